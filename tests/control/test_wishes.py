"""What the driver wishes of its controller, whenever it does: without Ray."""

import asyncio

from elastic.on_ray.actors import ControllerActor


def test_a_stop_that_comes_while_the_controller_starts_is_obeyed():
    actor = object.__new__(ControllerActor)  # its constructor asks Ray who it is
    actor._wishes, actor._early = {}, []
    heard = []
    asyncio.run(actor.stop("SIGINT at the driver"))
    actor.listen(stop=heard.append, end_now=heard.append, note=heard.append)
    asyncio.run(actor.end_now("SIGINT again"))
    assert heard == ["SIGINT at the driver", "SIGINT again"]
