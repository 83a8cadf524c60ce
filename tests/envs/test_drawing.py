import pytest

from arborl.envs.games.drawing import draw_frozen_lake


def test_the_picture_has_the_size_of_its_grid():
    image = draw_frozen_lake("P_O\n_OG", cell=32)
    assert (image.mode, image.size) == ("RGB", (96, 64))


def test_the_same_grid_gives_the_same_picture_and_every_symbol_its_own():
    pictures = {symbol: draw_frozen_lake(symbol).tobytes() for symbol in "P_OGX√"}
    assert len(set(pictures.values())) == 6
    assert draw_frozen_lake("P").tobytes() == pictures["P"]


def test_a_hole_is_dark_blue_a_lost_player_reddish_an_arrived_one_greenish():
    def middle(symbol, x, y):
        return draw_frozen_lake(symbol, 96).getpixel((x, y))

    red, green, blue = middle("O", 48, 48)
    assert blue > red
    assert blue > green
    assert blue < 110
    red, green, blue = middle("X", 48, 80)
    assert red > blue > green or red > green
    red, green, blue = middle("√", 10, 10)
    assert green > red
    assert green > blue


def test_rows_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="equal rows"):
        draw_frozen_lake("P_\nG")
