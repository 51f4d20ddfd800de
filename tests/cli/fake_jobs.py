"""A job server's HTTP as Ray's client asks for it: one job, which does what a test says."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import WSCloseCode, web


class FakeJobs:
    """Use as a context manager."""

    def __init__(self) -> None:
        self.status, self.message, self.exit_status = "RUNNING", "", None
        self.log, self.is_mute = "", False
        """Mute: a log's connection stays open, and says no more."""
        self.names: list[str] = []
        """Of the jobs that are on the list."""
        self.runs: list[str] = []
        """Ids of jobs that are runs, which are on the list from the beginning."""
        self.run_status: list[tuple[str, int | None]] = []
        """Status and exit status of the runs, one each time that one is asked for, the last one
        again and again; without any they are those of all jobs."""
        self.entrypoints: list[str] = []
        """Of all jobs that were submitted."""
        self.num_tails = 0
        self.on_tail: Callable[[], None] = lambda: None
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "FakeJobs":
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/api/version", self._version)
        app.router.add_get("/api/jobs/", self._list)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/{id}", self._look)
        app.router.add_delete("/api/jobs/{id}", self._delete)
        app.router.add_post("/api/jobs/{id}/stop", self._stop)
        app.router.add_get("/api/jobs/{id}/logs", self._whole_log)
        app.router.add_get("/api/jobs/{id}/logs/tail", self._tail)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._is_up.set()
        self._loop.run_forever()

    async def _version(self, _) -> web.Response:
        return web.json_response({"version": "4", "ray_version": "2.50.0", "ray_commit": ""})

    async def _list(self, _) -> web.Response:
        return web.json_response([self._about(name) for name in self.runs])

    async def _submit(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name = asked["submission_id"]
        self.names.append(name)
        self.entrypoints.append(asked["entrypoint"])
        return web.json_response({"job_id": name, "submission_id": name})

    async def _look(self, request: web.Request) -> web.Response:
        return web.json_response(self._about(request.match_info["id"]))

    def _about(self, name: str) -> dict[str, Any]:
        found = {"type": "SUBMISSION", "entrypoint": "", "submission_id": name}
        status, exit_status = self.status, self.exit_status
        if name in self.runs and self.run_status:
            status, exit_status = self.run_status[0]
            self.run_status = self.run_status[1:] or self.run_status
        said = {"status": status, "message": self.message}
        return {**found, **said, "driver_exit_code": exit_status}

    async def _stop(self, _) -> web.Response:
        self.status = "STOPPED"
        return web.json_response({"stopped": True})

    async def _delete(self, request: web.Request) -> web.Response:
        if self.status == "RUNNING":
            return web.Response(status=500, text="it is not in a terminal state")
        self.names.remove(request.match_info["id"])
        return web.json_response({"deleted": True})

    async def _whole_log(self, _) -> web.Response:
        return web.json_response({"logs": self.log})

    async def _tail(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_tails += 1
        self.on_tail()
        if self.log:
            await socket.send_str(self.log)
        if self.is_mute:
            await asyncio.Event().wait()
        await socket.close(code=WSCloseCode.OK)
        return socket
