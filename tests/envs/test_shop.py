import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborl.envs.games.shop import (
    Shop,
    ShopPage,
    ShopSite,
    plain_color,
    purchase_reward,
    token_set_ratio,
    type_score,
)
from arborl.envs.games.shop_catalogue import (
    Catalogue,
    GeneratedProducts,
    Product,
    ShopGoal,
    draw_goal,
    generated_catalogue,
    load_webshop,
    nouns,
    prepare_webshop,
)
from arborl.types import Message, Task

seeds = st.integers(0, 2**63 - 1)

SHIRT = Product(
    id="B1",
    title="soft cotton running shirt",
    query="running shirt",
    category="clothing › shirt",
    nouns=("running", "shirt"),
    attributes=("soft", "cotton"),
    options=(("color", ("red", "blue")), ("size", ("small", "large"))),
    price=20.0,
    description="A shirt by Norva.",
    features=("It can be machine washed.",),
)
GOAL = ShopGoal("Find me", SHIRT, ("soft", "cotton"), (("color", "red"), ("size", "large")), 30.0, "soft cotton shirt")
RIGHT = {"color": "red", "size": "large"}


def test_a_purchase_is_worth_its_share_of_attributes_options_and_price():
    assert purchase_reward(GOAL, SHIRT, RIGHT) == 1.0
    assert purchase_reward(GOAL, SHIRT, {"color": "red"}) == pytest.approx(4 / 5)
    assert purchase_reward(GOAL, SHIRT, {"color": "blue", "size": "small"}) == pytest.approx(3 / 5)
    assert purchase_reward(GOAL, replace(SHIRT, price=30.01), RIGHT) == pytest.approx(4 / 5)
    assert purchase_reward(
        GOAL, replace(SHIRT, attributes=("warm",), title="warm running shirt"), RIGHT
    ) == pytest.approx(3 / 5)
    assert purchase_reward(replace(GOAL, price_upper=0.0), replace(SHIRT, price=999.0), RIGHT) == 1.0
    assert purchase_reward(GOAL, SHIRT, {}) == pytest.approx(3 / 5)


def test_an_attribute_counts_wherever_the_product_mentions_it():
    washed = replace(GOAL, attributes=("machine washed",))
    assert purchase_reward(washed, SHIRT, RIGHT) == 1.0
    assert purchase_reward(washed, replace(SHIRT, features=()), RIGHT) == pytest.approx(3 / 4)
    assert purchase_reward(washed, replace(SHIRT, features=(), description="Machine washed at 30."), RIGHT) == 1.0


def test_the_kind_of_product_scales_the_whole_as_in_webshop():
    assert type_score(SHIRT, SHIRT) == 1.0
    lamp = replace(SHIRT, query="desk lamp", category="furniture › lamp", nouns=("desk", "lamp"))
    assert type_score(SHIRT, lamp) == 0.0
    long = replace(SHIRT, nouns=tuple("abcdefghij"))
    other = replace(lamp, nouns=("a", "b"))
    assert type_score(long, other) == 0.5  # 2 of 10 nouns, other query, other category
    assert type_score(long, replace(other, query=long.query)) == 1.0
    assert type_score(long, replace(other, category="shirt › clothing")) == 1.0
    assert type_score(long, replace(other, nouns=("a", "b", "c"))) == 1.0
    assert type_score(replace(SHIRT, nouns=tuple("abcdefghijk")), replace(other, nouns=("a",))) == 0.1
    assert type_score(replace(SHIRT, nouns=()), replace(lamp, query=SHIRT.query)) == 1.0
    assert type_score(replace(SHIRT, nouns=()), lamp) == 0.5


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [  # computed with rapidfuzz, which thefuzz calls
        ("red", "red", 100),
        ("red", "dark red", 100),
        ("machine wash", "wash machine", 100),
        ("cotton", "cottons", 92),
        ("light blue", "light green", 67),
        ("x-large", "large", 100),
        ("12 pack", "10 pack", 86),
        ("small", "large", 20),
        ("", "red", 0),
        ("soft cotton shirt", "soft wool shirt", 81),
    ],
)
def test_texts_are_as_alike_as_thefuzz_says(one, other, score):
    assert token_set_ratio(one, other) == token_set_ratio(other, one) == score


def test_a_color_is_known_by_any_of_its_names():
    assert plain_color("Light Navy stripes") == "navy"
    assert plain_color("large") == "large"
    navy = replace(GOAL, options=(("color", "navy"),))
    assert purchase_reward(navy, SHIRT, {"color": "navy 02"}) == 1.0


@given(seeds, st.integers(0, 3))
@settings(max_examples=40)
def test_the_goals_own_product_always_gives_the_full_reward_and_no_purchase_gives_more(seed, number):
    catalogue = generated_catalogue(2000, number)
    goal = draw_goal(catalogue, seed, "train")
    assert purchase_reward(goal, goal.product, dict(goal.options)) == 1.0
    other = catalogue.products[seed % 2000]
    chosen = {kind: values[seed % len(values)] for kind, values in other.options}
    assert 0.0 <= purchase_reward(goal, other, chosen) <= 1.0
    assert goal.product.price < goal.price_upper


def test_products_of_one_kind_compete():
    titles = [product.query for product in GeneratedProducts(1000, 0)]
    assert min(titles.count(query) for query in set(titles)) > 10


def test_search_ranks_by_shared_words_and_breaks_ties_by_place():
    names = ["red wool hat", "red cotton shirt", "blue cotton shirt", "red cotton shirt"]
    products = [replace(SHIRT, id=f"B{i}", title=name) for i, name in enumerate(names)]
    catalogue = Catalogue(products, names, [product.id for product in products])
    assert [product.id for product in catalogue.search("Red cotton SHIRT!")] == ["B1", "B3", "B2", "B0"]
    assert [product.id for product in catalogue.search("shirts", limit=2)] == ["B1", "B2"]
    assert catalogue.search("") == catalogue.search('"" ( OR *') == catalogue.search("zebra") == []
    assert catalogue.product("b2").title == "blue cotton shirt"
    assert catalogue.product("B9") is None


def say(env, *texts):
    """Open the shop and say these; the steps."""

    async def run():
        await env.reset(Task("t", seed=2), 0)
        return [await env.step(Message("assistant", text)) for text in texts]

    return asyncio.run(run())


def test_pages_lead_where_webshops_do():
    env = Shop()
    asyncio.run(env.reset(Task("t", seed=2), 0))
    words = env.current_goal.words
    say(env, f"search[{words}]", "click[next >]", "click[< prev]")
    assert env.page == ShopPage("results", words=words)
    item = env.site.results(env.page)[0]
    (kind, (value, *_)), *_ = item.options
    path = [f"search[{words}]", f"click[{item.id.lower()}]", f"click[{value}]", "click[Features]", "click[< Prev]"]
    steps = say(env, *path)
    assert env.page == ShopPage("item", words=words, item=item.id, chosen=((kind, value),))
    assert f"It is {item.attributes[0]}." in steps[3].observation.messages[0].content
    assert f"Chosen: {value}" in steps[4].observation.messages[0].content
    say(env, *path, "click[< Prev]")
    assert env.page == ShopPage("results", words=words)
    say(env, *path, "click[Back to Search]")
    assert env.page == ShopPage()
    steps = say(env, *path, "click[Buy Now]")
    assert steps[-1].terminated
    assert [step.reward for step in steps[:-1]] == [0.0] * 5


def test_an_option_chosen_again_replaces_the_last_choice():
    site = ShopSite(Catalogue([SHIRT], ["shirt"], ["B1"]), 5)
    page = site.click(site.click(ShopPage("item", item="B1"), "red"), "Blue")
    assert page.options == {"color": "blue"}
    assert site.click(page, "small").options == {"color": "blue", "size": "small"}


@pytest.mark.parametrize(
    "text",
    ["search[]", "click[Buy Now]", "buy", "click[B1]", "search", "find[shirt]", "", "click[]", "<answer></answer>"],
)
def test_what_the_page_does_not_offer_is_refused_and_the_page_stays(text):
    env = Shop(format_penalty=-0.2)
    (step,) = say(env, text)
    assert step.reward == -0.2
    assert step.observation.messages[0].content.startswith(Shop.invalid)
    assert env.page == ShopPage()


def test_searching_is_for_the_search_page_alone_and_actions_may_stand_in_words_or_tags():
    env = Shop()
    first, second = say(env, "I look: <answer>search[shirt]</answer>", "search[lamp]")
    assert first.info == {"valid": 1.0, "effective": 1.0}
    assert second.info == {"valid": 0.0, "effective": 0.0}
    (nothing,) = say(env, "search[zebra]")
    assert "Nothing found." in nothing.observation.messages[0].content
    assert env.actions() == ["click[Back to Search]"]


def test_a_purchase_of_another_product_is_no_success():
    env = Shop()
    asyncio.run(env.reset(Task("t", seed=2), 0))
    wrong = next(product for product in env.catalogue.products if type_score(env.current_goal.product, product) == 0.0)
    steps = say(env, f"search[{wrong.title}]", f"click[{wrong.id}]", "click[Buy Now]")
    assert steps[-1].terminated
    assert env.metrics()["bought"] == 1.0
    assert env.metrics()["success"] == env.metrics()["score"] == 0.0


def write_webshop(folder, count=40):
    """Files in WebShop's shape, with products of our own."""
    stock = GeneratedProducts(count, 9)
    rows, notes, people = [], {}, {}
    for product in stock:
        asin = f"B{product.id[1:].zfill(9)}"
        options = {kind.upper(): [{"value": v, "image": None} for v in values] for kind, values in product.options}
        about = {"asin": asin, "name": product.title, "query": product.query, "product_category": product.category}
        texts = {"full_description": product.description, "small_description": list(product.features)}
        rows.append(about | texts | {"pricing": f"${product.price:.2f}", "customization_options": options})
        attributes = list(product.attributes)
        notes[asin] = {"attributes": attributes, "instruction": f"Find me {product.title}"}
        notes[asin]["instruction_attributes"] = attributes
        wanted = {kind: values[0] for kind, values in product.options}
        person = {"instruction": "i want it.", "instruction_attributes": attributes[:1], "instruction_options": wanted}
        people[asin] = [person]
    rows += [{**rows[0]}, {**rows[0], "asin": "nan"}]
    (folder / "items_shuffle_1000.json").write_text(json.dumps(rows))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(notes))
    (folder / "items_human_ins.json").write_text(json.dumps(people))


@pytest.mark.parametrize("human", [True, False])
def test_webshops_own_files_are_played(human, tmp_path):
    write_webshop(tmp_path)
    shelf = load_webshop(str(tmp_path), human)
    assert len(shelf.catalogue) == 40
    assert sum(map(len, shelf.goals.values())) == 40

    async def play(seed):
        env = Shop(data=str(tmp_path), human=human)
        opening = await env.reset(Task("t", seed=seed), 0)
        while not (await env.step(Message("assistant", env.oracle()))).over:
            pass
        return opening.messages[1].content, env.metrics()["success"]

    played = [asyncio.run(play(seed)) for seed in range(20)]
    assert all(success == 1.0 for _, success in played)
    assert all(("i want it" in text) == human for text, _ in played)
    assert all("price lower than" in text for text, _ in played)


def test_prices_of_files_may_be_ranges_or_missing_and_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no items_shuffle.json or items_shuffle_1000.json"):
        load_webshop(str(tmp_path))
    write_webshop(tmp_path, 20)
    file = tmp_path / "items_shuffle_1000.json"
    rows = json.loads(file.read_text())
    rows[0]["pricing"], rows[1]["pricing"], rows[2]["pricing"] = "$10.00$20.00", None, "$1,299.00"
    file.write_text(json.dumps(rows[:20]))
    prices = [product.price for product in load_webshop(str(tmp_path), False).catalogue.products]
    assert 10 <= prices[0] <= 20
    assert prices[1:3] == [100.0, 1299.0]


def test_the_nouns_of_a_real_title_are_its_longer_words():
    assert nouns("Men's 2-Pack Soft Cotton T-Shirt for the Gym") == ("soft", "cotton", "shirt", "gym")


@pytest.mark.slow
def test_a_hundred_thousand_products_can_be_searched_and_bought():
    async def play(seed):
        env = Shop(products=100_000)
        await env.reset(Task("t", seed=seed, fields={"split": "held_out"}), 0)
        while not (await env.step(Message("assistant", env.oracle()))).over:
            pass
        return env.metrics()["success"]

    assert sum(asyncio.run(play(seed)) for seed in range(100)) >= 99


def test_a_catalogue_is_decided_by_its_size_and_seed():
    first, again, other = GeneratedProducts(500, 1), GeneratedProducts(500, 1), GeneratedProducts(500, 2)
    assert list(first) == list(again)
    assert list(first) != list(other)
    assert len({product.id for product in first}) == 500


def test_the_step_limit_truncates():
    env = Shop(max_steps=2)
    steps = say(env, "search[shirt]", "click[Back to Search]")
    assert [step.truncated for step in steps] == [False, True]
    assert env.metrics()["bought"] == 0.0


def test_downloaded_files_of_webshop_are_prepared_and_played(tmp_path):
    """Products are read one at a time, also where a product does not end with what is read at once."""
    (tmp_path / "data").mkdir()
    write_webshop(tmp_path / "data", 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arborl.envs.games.shop_catalogue.CHUNK", 100)
        written = prepare_webshop(tmp_path, tmp_path / "out", 50)
    assert written == {"items_shuffle.json": 50, "items_ins_v2.json": 50, "items_human_ins.json": 50}
    assert len(load_webshop(str(tmp_path / "out")).catalogue) == 50
    assert (
        len(load_webshop(str(tmp_path / "out" / "items_shuffle.json")).catalogue) == 50
    )  # a file stands for its folder
    every = prepare_webshop(tmp_path / "data", tmp_path / "all")
    assert every["items_shuffle.json"] == 61  # the one without an asin is dropped when it is read
    assert len(load_webshop(str(tmp_path / "all")).catalogue) == 60


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("items_shuffle_1000.json", "{}", "is not a JSON list of products"),
        ("items_shuffle_1000.json", '[{"asin": "B1"}, {"asin', "is not complete JSON"),
        ("items_shuffle_1000.json", "[]", "has no products with an asin"),
        ("items_ins_v2_1000.json", "[]", "is not a JSON object by asin"),
        ("items_ins_v2_1000.json", "{", "not valid JSON"),
    ],
)
def test_damaged_files_of_webshop_are_named(name, text, says, tmp_path):
    write_webshop(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name}: {says}"):
        prepare_webshop(tmp_path, tmp_path / "out")
