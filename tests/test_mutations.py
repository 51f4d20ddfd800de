"""The mutations of tests/mutations.py can still be planted, and name tests that exist."""

from tests.mutations import MUTATIONS, ROOT, lacks


def test_every_mutation_has_its_place():
    assert [why for why in map(lacks, MUTATIONS) if why] == []
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 20


def test_every_mutation_names_tests_that_exist():
    paths = {path for m in MUTATIONS for path in m.tests.split()}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_simulation_is_held_by_ten_bugs_of_the_protocol_at_least():
    assert sum(m.is_of_protocol for m in MUTATIONS) >= 10
