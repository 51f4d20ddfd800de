"""The controller's ends of its links, dialled as workers and pulses do."""

import asyncio

import pytest

from elastic.on_ray import links
from elastic.on_ray.links import LinkServer
from elastic.protocol.messages.direction import pack
from elastic.protocol.messages.hello import Hello
from elastic.protocol.messages.to_controller import Synced

PATIENCE_S = 60


def test_a_successor_listens_where_its_predecessor_did():
    async def run():
        nothing = lambda *_: None  # noqa: E731
        first, second = (LinkServer("secret", nothing, nothing, nothing) for _ in range(2))
        address = await first.open("127.0.0.1")
        assert not await second.open_also(address), "it is there still"
        first.close()
        own = await second.open("127.0.0.1")
        assert await second.open_also(address)
        assert await second.open_also(address), "again"
        assert await second.open_also(own)
        assert not await second.open_also(("192.0.2.1", 1)), "another host's"
        for port in (own[1], address[1]):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
        second.close()

    asyncio.run(run())


async def greeted_late(
    address: tuple[str, int], workers: list[int], number: int
) -> list[asyncio.StreamWriter]:
    """Connections for them, all of which exist before the first one says who it is."""
    dialled = [(await asyncio.open_connection(*address))[1] for _ in workers]
    for worker, writer in zip(workers, dialled, strict=True):
        writer.write(pack(Hello("secret", worker, "worker", number)) + pack(Synced(0)))
    return dialled


@pytest.mark.parametrize(("num_known", "num_dials"), [(0, 200), (40, 160)])
def test_all_who_dial_at_once_are_served(monkeypatch, num_known: int, num_dials: int):
    """Nobody knows a successor's workers yet; of those that are known, links and pulses dial twice
    when all connections are reset at once."""

    async def run():
        heard: list[int] = []
        if num_known:
            monkeypatch.setattr(links, "MAX_STRANGERS", 8)
        nothing = lambda *_: None  # noqa: E731
        server = LinkServer("secret", lambda worker, _: heard.append(worker), nothing, nothing)
        address, dialled = await server.open("127.0.0.1"), []

        async def dial(workers: list[int]) -> None:
            heard.clear()
            dialled.extend(await greeted_late(address, workers, len(dialled)))
            while len(heard) < len(workers):
                await asyncio.sleep(0.01)
            assert sorted(heard) == workers

        for worker in range(num_known):
            await dial([worker])
        await dial([*range(num_dials)])
        server.close()
        for writer in dialled:
            writer.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
