"""Shop: find and buy what the instruction asks for, over WebShop's pages and with its reward.

Start with `game.py` (the environment), then `pages.py` (what is shown and where a click leads), `reward.py` (what a
purchase is worth), `catalogue.py` (products and search), `stock.py` (a generated catalogue) and `webshop.py` (the real
one, from files).
"""

from arborl.envs.shop.game import Shop

__all__ = ["Shop"]
