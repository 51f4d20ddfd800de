"""What the blocks of a pipeline cost is in config.json, and is no setting."""

import asyncio

from elastic.driver.resume import differences
from elastic.protocol.messages.to_controller import Planned
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
