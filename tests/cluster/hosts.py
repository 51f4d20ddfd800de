"""Real hosts on one machine: network namespaces joined by a bridge, a raylet in each.

Addresses differ and links can be cut, throttled and made lossy. The bridge has a namespace of its
own, so that this machine's own network is left alone. Needs root and iproute2 (loss: iptables).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.fork_client import ADDRESS, NETWORK
from tests.cluster.live import LiveRun, environment, leftovers
from tests.cluster.shared_head import UNPREPARED

GCS_PORT = 6379
START_S = 60.0
RELAY = Path(__file__).parent / "relay.py"
STORE_BYTES = 100 * 2**20
FORKS = {"RAY_START_HOOK": "tests.cluster.forked_nodes.fork_workers", **UNPREPARED}


class Forbidden(Exception):
    """This machine does not allow or have it; the message is a reason to skip."""


def sh(*command: str) -> str:
    """Run it; Forbidden with what it said if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    except FileNotFoundError as error:
        raise Forbidden(f"{command[0]} is not installed") from error
    if done.returncode:
        raise Forbidden(f"`{' '.join(command)}` says: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def command_of(pid: int) -> str:
    """Its title, empty if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


class Hosts:
    """A context manager: `count` hosts on one network; everything is gone afterwards."""

    def __init__(self, count: int, *, num_cpus: int = 1, head_cpus: int | None = None) -> None:
        """num_cpus: slots of each host; head_cpus: of host 0, if they differ."""
        self.count, self.num_cpus = count, num_cpus
        self.head_cpus = num_cpus if head_cpus is None else head_cpus
        self.head_env: dict[str, str] = {}
        """Ray's own settings of the head."""
        self.tag = f"el{os.getpid()}"
        self.switch = f"{self.tag}s"
        self.temp = Path(tempfile.mkdtemp(prefix="eh-", dir="/tmp"))
        self._relays: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Hosts":
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._remove()

    # --- the network ------------------------------------------------------------
    def name(self, host: int) -> str:
        """The namespace."""
        return f"{self.tag}h{host}"

    def address(self, host: int) -> str:
        return f"10.213.0.{host + 1}"

    def host_of(self, address: str) -> int:
        return next(h for h in range(self.count) if self.address(h) == address)

    def inside(self, host: int, *command: str) -> list[str]:
        """The command line that runs `command` on the host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def _build(self) -> None:
        if os.geteuid() != 0:
            raise Forbidden("network namespaces need root")
        sh("ip", "netns", "add", self.switch)
        sh("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        sh("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for host in range(self.count):
            name, port = self.name(host), f"port{host}"
            sh("ip", "netns", "add", name)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", name)
            sh("ip", "-n", self.switch, "link", "add", port, *ends)
            sh("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
            sh("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")

    def cut(self, host: int) -> float:
        """No packet passes any more, and nobody is told; returns the Unix time."""
        at = time.time()
        sh("ip", "-n", self.switch, "link", "set", f"port{host}", "down")
        return at

    def mend(self, host: int) -> None:
        sh("ip", "-n", self.switch, "link", "set", f"port{host}", "up")

    def throttle(self, host: int, rate: str) -> None:
        """Both directions; `rate` as tc writes it: 10mbit."""
        shape = ("root", "tbf", "rate", rate, "burst", "64kbit", "latency", "400ms")
        sh("tc", "-n", self.switch, "qdisc", "replace", "dev", f"port{host}", *shape)
        sh("tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0", *shape)

    def delay(self, host: int, time_ms: int) -> None:
        """Packets in both directions are late; by a relay (once) where the kernel has no netem."""
        how = ("root", "netem", "delay", f"{time_ms}ms")
        try:
            sh("tc", "-n", self.switch, "qdisc", "replace", "dev", f"port{host}", *how)
            sh("tc", "-n", self.name(host), "qdisc", "replace", "dev", "eth0", *how)
        except Forbidden:
            self._relay(host, time_ms)

    def _relay(self, host: int, time_ms: int) -> None:
        """The host keeps its addresses, so its connections live on."""
        name, outer, inner = self.name(host), f"outer{host}", f"inner{host}"
        mac = sh("ip", "netns", "exec", name, "cat", "/sys/class/net/eth0/address").strip()
        command = [sys.executable, str(RELAY), outer, inner, str(time_ms)]
        relay = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._relays.append(relay)
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise Forbidden("neither netem nor TAP devices")
        sh("ip", "-n", self.switch, "link", "delete", f"port{host}")
        sh("ip", "-n", self.switch, "link", "set", outer, "name", f"port{host}")
        sh("ip", "-n", self.switch, "link", "set", f"port{host}", "master", "bridge", "up")
        sh("ip", "-n", self.switch, "link", "set", inner, "netns", name)
        sh("ip", "-n", name, "link", "set", inner, "name", "eth0", "address", mac)
        sh("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        sh("ip", "-n", name, "link", "set", "eth0", "up")

    def lose(self, host: int, part: float, *, incoming: bool = True, outgoing: bool = True) -> None:
        """Drop this part of the packets, from 0 to 1, instead of what was dropped before."""
        for chain, is_wanted in (("INPUT", incoming), ("OUTPUT", outgoing)):
            sh(*self.inside(host, "iptables", "-F", chain))
            if is_wanted and part > 0:
                rule = ("-m", "statistic", "--mode", "random", "--probability", str(part))
                drop = ("!", "-i", "lo") if chain == "INPUT" else ("!", "-o", "lo")
                sh(*self.inside(host, "iptables", "-A", chain, *drop, *rule, "-j", "DROP"))

    def separate(self, host: int, other: int) -> float:
        """No packet passes between these two any more, in no direction; returns the Unix time."""
        at = time.time()
        for chain, end in (("INPUT", "-s"), ("OUTPUT", "-d")):
            drop = ("-A", chain, end, self.address(other), "-j", "DROP")
            sh(*self.inside(host, "iptables", *drop))
        return at

    def reset(self, host: int, other: int) -> None:
        """Connections between these two break, as when a firewall forgets them; new ones may come
        about."""
        rule = ("OUTPUT", "-p", "tcp", "-d", self.address(other), "-j", "REJECT")
        rule += ("--reject-with", "tcp-reset")
        sh(*self.inside(host, "iptables", "-A", *rule))
        time.sleep(0.5)  # until something has been sent on each: the fault itself
        sh(*self.inside(host, "iptables", "-D", *rule))

    # --- what runs there -----------------------------------------------------------
    def start_ray(self) -> str:
        """A raylet on each host, the head on host 0; returns the cluster's address."""
        for host in range(self.count):
            self.start_raylet(host)
        return f"{self.address(0)}:{GCS_PORT}"

    def start_raylet(self, host: int) -> None:
        """Also once more, on a host that has crashed."""
        head = f"{self.address(0)}:{GCS_PORT}"
        where = ("--head", f"--port={GCS_PORT}") if host == 0 else (f"--address={head}",)
        temp = self.temp / str(host)
        temp.mkdir(exist_ok=True)
        (temp / "ray_current_cluster").unlink(missing_ok=True)  # else it "is already running"
        options = [
            f"--node-ip-address={self.address(host)}",
            f"--num-cpus={self.num_cpus if host else self.head_cpus}",
            f"--object-store-memory={STORE_BYTES}",
            "--disable-usage-stats",
            *((f"--temp-dir={temp}", "--include-dashboard=false") if host == 0 else ()),
        ]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *options]
        started = subprocess.run(
            self.inside(host, *ray),
            env=self._environment(host) | (self.head_env if host == 0 else {}),
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        assert started.returncode == 0, started.stdout + started.stderr

    def _environment(self, host: int) -> dict[str, str]:
        """Of its Ray. Where there is a fork server, workers come from it, and enter the network."""
        env = environment(self.temp / str(host))
        if ADDRESS not in env:
            return env
        return env | FORKS | {NETWORK: f"/run/netns/{self.name(host)}"}

    def run(self, target: str, storage: Path, name: str, *, host: int = 0, **options) -> LiveRun:
        """`elastic run` on a host, in the cluster."""
        address = f"{self.address(0)}:{GCS_PORT}"
        run = LiveRun(target, storage, name, self.temp / str(host), address=address, **options)
        run.command = self.inside(host, *run.command)
        return run

    def pids(self, host: int) -> list[int]:
        """Every process on the host."""
        return [int(pid) for pid in sh("ip", "netns", "pids", self.name(host)).split()]

    def host_running(self, title: str) -> int:
        """The host of the one process whose title begins like this."""
        found = [
            host
            for host in range(self.count)
            for pid in self.pids(host)
            if command_of(pid).startswith(title)
        ]
        assert len(found) == 1, f"{title} runs on hosts {found}"
        return found[0]

    def crash(self, host: int) -> float:
        """Every process on the host is gone at once, as with the power; returns the Unix time."""
        at = time.time()
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at

    def _remove(self) -> None:
        for relay in self._relays:
            relay.communicate(timeout=10)  # the end of its input is its own
        for name, host in [(self.name(h), h) for h in range(self.count)] + [(self.switch, -1)]:
            if host >= 0:
                self._end_all(host)
            with contextlib.suppress(Forbidden):  # was never made
                sh("ip", "netns", "delete", name)
        shutil.rmtree(self.temp, ignore_errors=True)

    def _end_all(self, host: int) -> None:
        deadline = time.monotonic() + 10
        with contextlib.suppress(Forbidden):
            while leftovers(self.pids(host)) and time.monotonic() < deadline:
                self.crash(host)
                time.sleep(0.02)  # polling, bounded by the deadline
