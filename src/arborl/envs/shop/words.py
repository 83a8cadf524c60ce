"""The words that the generated catalogue is made of: short and plain, since small models read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Department:
    """Things of one kind: any use goes with any noun, and attributes and options with all."""

    name: str
    nouns: tuple[str, ...]
    uses: tuple[str, ...]
    attributes: tuple[str, ...]
    options: tuple[str, ...]


def _department(name: str, nouns: str, uses: str, attributes: str, *options: str) -> Department:
    return Department(name, tuple(nouns.split()), tuple(uses.split()), tuple(attributes.split()), options)


DEPARTMENTS = (
    _department(
        "clothing",
        "shirt jacket dress sweater skirt coat hoodie vest scarf glove hat sock belt tie robe cape",
        "running winter summer office hiking rain yoga party travel garden school beach city evening work holiday",
        "soft warm light slim loose cotton wool linen silk striped plain washable",
        "color",
        "size",
    ),
    _department(
        "shoes",
        "boot sandal sneaker slipper clog loafer",
        "running winter summer office hiking rain party travel beach city evening work",
        "soft warm light narrow wide leather canvas rubber padded plain flat waterproof",
        "color",
        "size",
    ),
    _department(
        "kitchen",
        "pan pot kettle knife mug bowl plate jar tray spoon grater whisk ladle peeler",
        "soup tea coffee camping travel salad bread cake pasta rice fish fruit egg breakfast",
        "steel glass ceramic wooden nonstick heavy light deep flat round square sturdy",
        "color",
    ),
    _department(
        "furniture",
        "table chair lamp shelf desk bed sofa stool rug mirror bench cabinet rack",
        "kitchen office bedroom garden hall bath library nursery studio attic porch dining",
        "oak pine steel glass folding low tall narrow wide round modern rustic",
        "color",
        "size",
    ),
    _department(
        "electronics",
        "cable charger speaker keyboard mouse headset camera radio tablet clock lamp fan",
        "travel office car home studio gaming desk kitchen bedroom garden school",
        "wireless slim loud quiet fast small large solar waterproof bright foldable light",
        "color",
    ),
    _department(
        "beauty",
        "soap cream shampoo lotion brush oil balm scrub mask comb powder",
        "face hand hair body foot lip bath night day beard baby",
        "gentle fresh rich mild natural vegan organic scented creamy clear cool light",
        "size",
    ),
    _department(
        "toys",
        "puzzle doll kite ball car train robot drum boat block bear game",
        "bath beach garden travel party school birthday baby family indoor outdoor",
        "wooden soft plush plastic big small musical magnetic noisy quiet safe striped",
        "color",
    ),
    _department(
        "garden",
        "shovel rake hose pot glove chair lamp fork bucket basket bench saw",
        "flower vegetable lawn tree patio balcony winter spring rose herb fruit",
        "steel wooden plastic light heavy long short sharp sturdy folding green compact",
        "size",
    ),
)
OPTIONS = {
    "color": ("red", "blue", "green", "black", "white", "pink", "brown", "yellow"),
    "size": ("small", "medium", "large", "huge", "tiny"),
}
BRANDS = (
    "Norva", "Alder", "Pico", "Lumen", "Tarn", "Velo", "Brim", "Oslo", "Fable", "Quill", "Sable", "Ridge", "Mira",
    "Kestrel", "Dune", "Halden",
)  # fmt: skip
