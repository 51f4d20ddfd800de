"""What a run finds out of itself is in config.json, and is no setting."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from elastic.driver.resume import PastRun, config_json, differences
from elastic.protocol.messages.to_controller import Fingerprint, Planned
from elastic.store.files import open_folder, read_json
from tests.test_recorder import close, recorder


def test_what_blocks_cost_is_in_the_configuration_and_is_no_setting(tmp_path):
    said = Planned(1, "1 pipeline of 2 stages", (), (), 0, ("blocks.0", "blocks.1"), (3e9, 4e9))

    async def run() -> None:
        opened = recorder(str(tmp_path))
        await opened.open_at(0, [])
        opened.record_planned(said)
        await close(opened)

    asyncio.run(run())
    found = read_json(open_folder(str(tmp_path / "r")), "config.json")
    assert found == {"steps": 9, "block_costs": {"blocks.0": 3e9, "blocks.1": 4e9}}
    assert differences(found, {"steps": 9}) == []


def test_what_its_bits_depend_on_is_there_once_and_for_each_resume(tmp_path):
    said = Fingerprint((("GPU", "H100"), ("driver", "580")))

    async def run() -> None:
        opened = recorder(str(tmp_path))
        opened.record_fingerprint(said)
        await opened.open_at(0, [])
        opened.record_fingerprint(Fingerprint((("GPU", "A100"),)))
        opened.record_planned(Planned(1, "", (), (), 0, ("b.0",), (3e9,)))
        await close(opened)

    asyncio.run(run())
    found = read_json(open_folder(str(tmp_path / "r")), "config.json")
    facts = {"GPU": "H100", "driver": "580"}
    assert found == {"steps": 9, "block_costs": {"b.0": 3e9}, "fingerprint": facts}


@pytest.mark.parametrize("has_trained", [True, False])
def test_a_resume_keeps_it_and_a_run_that_came_to_nothing_has_none(has_trained):
    past = SimpleNamespace(config={"fingerprint": {"GPU": "H100"}}, has_trained=has_trained)
    content = config_json({"steps": 9}, "toy:Toy", {}, {}, past=cast(PastRun, past))
    assert ("fingerprint" in content) is has_trained
