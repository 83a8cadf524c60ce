"""Arguments of a chat template: the same in every render of a run, and refused where the template never reads them."""

import pytest

from arborl.chat import Conversations, HermesParser, Renderer, Template
from arborl.errors import ConfigError
from arborl.types import Completion, FinishReason, Message

BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
APPENDS = "{% if mood is defined %}<|im_start|>system\nBe {{ mood }}.<|im_end|>\n{% endif %}" + BODY + "{% endif %}"
FORGETS = (
    BODY + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def renderer(tokenizer, source, **arguments):
    template = Template(source, None, "<|im_end|>", arguments=arguments)
    return Renderer(tokenizer, template, HermesParser(), (tokenizer.token_id("<|im_end|>"),))


def talk(made, turns):
    """The prompts of a conversation, each with all tokens up to then."""
    conversations, messages, prompts = Conversations(made), [], []
    for number in range(turns):
        messages.append(Message("user", f"Question {number}?"))
        prompt = conversations.prompt(messages)
        assert prompt.tokens == tuple(made.encode(made.render(messages)))
        ids = (*made.tokenizer.encode("Three."), made.stop[0])
        completion = Completion(ids, (0.0,) * len(ids), FinishReason.STOP)
        conversations.record(prompt, completion)
        messages.append(made.read(completion))
        prompts.append((prompt, (*prompt.tokens, *ids)))
    return prompts


def test_every_prompt_of_a_conversation_is_rendered_with_them_and_goes_on_from_the_last(tokenizer):
    prompts = talk(renderer(tokenizer, APPENDS, mood="brief"), 4)
    for (prompt, _), (_, before) in zip(prompts[1:], prompts, strict=False):
        assert prompt.tokens[: len(before)] == before
        assert prompt.reused == len(before)
    assert all(prompt.text.startswith("<|im_start|>system\nBe brief.") for prompt, _ in prompts)


def test_a_template_that_shows_empty_thoughts_only_in_front_of_the_reply_branches_and_patches_nothing(tokenizer):
    prompts = talk(renderer(tokenizer, FORGETS, enable_thinking=False), 3)
    for prompt, _ in prompts:
        assert prompt.text.endswith("<think>\n\n</think>\n\n")
        assert prompt.text.count("<think>") == 1
    assert [prompt.reused for prompt, _ in prompts] == [0, 0, 0]
    thinking = talk(renderer(tokenizer, FORGETS, enable_thinking=True), 2)
    assert thinking[1][0].reused == len(thinking[0][1])


def test_a_misspelt_argument_is_refused_and_one_of_another_template_has_no_effect_with_a_warning(tokenizer, caplog):
    with pytest.raises(
        ConfigError, match=r"model.chat_args.enable_thinkin: .*Did you mean 'enable_thinking'\?"
    ) as error:
        renderer(tokenizer, FORGETS, enable_thinkin=False)
    assert "It reads: enable_thinking." in str(error.value)
    plain, other = (renderer(tokenizer, BODY + "{% endif %}", **args) for args in ({}, {"enable_thinking": False}))
    assert plain.text([Message("user", "Hi")]) == other.text([Message("user", "Hi")])
    assert "model.chat_args.enable_thinking: the model's chat template does not read it" in caplog.text
    assert "It reads no arguments" in caplog.text


def test_arguments_are_read_checked_and_escaped(tokenizer):
    source = "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}" + BODY + "{% endif %}"
    assert renderer(tokenizer, source, date="then").text([]).startswith("then")
    assert renderer(tokenizer, source).text([]).startswith("today")
    with pytest.raises(ConfigError, match=r"model\.chat_args\.messages"):
        renderer(tokenizer, APPENDS, messages=[])

    made = renderer(tokenizer, APPENDS, mood="<|im_end|>")
    ends = made.encode(made.render([Message("user", "Hi")])).count(tokenizer.token_id("<|im_end|>"))
    assert ends == 2
    assert "Be <|im_end|>." in made.text([Message("user", "Hi")])


def test_the_template_for_tools_may_read_others(model_folder):
    both = [{"name": "default", "template": BODY + "{% endif %}"}, {"name": "tool_use", "template": APPENDS}]
    folder = model_folder(tokenizer_config={"chat_template": both, "eos_token": "<|im_end|>"})
    made = Renderer.from_folder(folder, chat_args={"mood": "brief"})
    assert "Be brief" not in made.text([Message("user", "Hi")])
    with pytest.raises(ConfigError, match="It reads: mood"):
        Renderer.from_folder(folder, chat_args={"mod": "brief"})
