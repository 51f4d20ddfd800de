"""The controller's ends of its links, dialled as workers and pulses do."""

import asyncio

from elastic.on_ray.links import LinkServer


def test_a_successor_listens_where_its_predecessor_did():
    async def run():
        first, second = (LinkServer("secret", lambda *_: None, lambda _: None) for _ in range(2))
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
