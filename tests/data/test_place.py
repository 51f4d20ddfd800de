"""How far a script is in its passes over data sets."""

from elastic.data.place import Place, Places


def test_a_pass_moves_with_what_is_given_and_the_next_one_follows():
    places = Places()
    assert places.begin("train", None, 6) == Place(number=0, row=0, window=6)
    places.move("train", 0, 12)
    assert (places.of("train"), places.numbers()) == (
        Place(number=0, row=12, window=6), {"train": 0},
    )  # fmt: skip
    places.end("train", 0)
    assert (places.of("train"), places.numbers()) == (Place(number=1), {"train": 1})
    assert places.begin("train", None, 0) == Place(number=1)


def test_a_pass_that_goes_on_is_shuffled_as_it_began_if_it_is_at_all():
    where = Place(number=2, row=18, window=6)
    assert Places().begin("train", where, 4) == where
    assert Places().begin("train", where, 0) == Place(number=2, row=18)
    plain = Place(number=2, row=18)
    assert Places().begin("train", plain, 4) == Place(number=2, row=18, window=4)


def test_who_begins_again_begins_with_the_pass_that_was_at_hand():
    places = Places({"train": 3, "valid": 1})
    places.begin("train", None, 0)
    assert places.numbers() == {"train": 3, "valid": 1}
    assert Places(places.numbers()).begin("train", None, 0).number == 3


def test_an_older_pass_that_is_still_read_moves_nothing():
    places = Places()
    places.begin("train", None, 0)
    places.begin("train", None, 0)
    places.move("train", 0, 7)
    places.end("train", 0)
    assert places.of("train") == Place(number=1)
