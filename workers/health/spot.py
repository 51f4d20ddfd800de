"""Spot notices: what a cloud tells a machine about its own end, asked for on the machine itself.

Says only that it comes, and when: what follows is elastic/control's. One small thread per worker.
"""

import http.client
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from elastic.protocol.spot import AUTO, HOST, SpotSource

ASK_EVERY_S = 0.5
FIND_AT_LEAST_EVERY_S = 10.0
"""Pauses between questions which cloud's the machine is double up to this."""
ANSWER_S = 2.0
TOKEN_S = 21600
"""For so long is a token of AWS good."""
LEAST_S = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""The notice that each cloud gives where it does not say when."""
AWS, GCP = "/latest/meta-data/spot/instance-action", "/computeMetadata/v1/instance/preempted"
AWS_TOKEN = "/latest/api/token"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
AZURE_SIGN = "/metadata/instance/compute/azEnvironment?api-version=2021-02-01&format=text"
"""The machine's environment: AzurePublicCloud, AzureUSGovernmentCloud and others. The first
question for events takes minutes, as it turns them on."""
AZURE_ENDS = ("Preempt", "Terminate")
NO_ANSWER = (
    *(OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError),
    *(ArithmeticError, RecursionError),
)
"""What asking raises where the server is away, or says what none of its cloud would."""

log = logging.getLogger(__name__)


class Metadata:
    """The metadata server of this machine's cloud."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token, self._token_until = "", 0.0
        self._name = ""
        self._notices = {"aws": self._aws, "gcp": self._gcp, "azure": self._azure}

    def left_s(self, cloud: str) -> float | None:
        """Seconds until this machine goes; None: nobody says that it does. One of NO_ANSWER if
        the server gives none that can be read."""
        return self._notices[cloud]()

    def find(self) -> str:
        """Which cloud's it is; empty if it is none of them."""
        for cloud, sign in {**self._notices, "azure": self._azure_sign}.items():
            try:
                sign()
            except NO_ANSWER:
                continue
            return cloud
        return ""

    def _aws(self) -> float | None:
        if time.monotonic() >= self._token_until:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = self._ask(AWS_TOKEN, ttl, method="PUT")
            self._token_until = time.monotonic() + TOKEN_S / 2
        try:
            said = self._ask(AWS, {"X-aws-ec2-metadata-token": self._token})
        except urllib.error.HTTPError as error:
            if error.code == 401:
                self._token_until = 0.0
            if error.code == 404:  # no end is near
                return None
            raise
        at = json.loads(said).get("time", "")
        return seconds_to(datetime.fromisoformat(at)) if at else LEAST_S["aws"]

    def _gcp(self) -> float | None:
        said = self._ask(GCP, {"Metadata-Flavor": "Google"}).strip().upper()
        if said not in ("TRUE", "FALSE"):
            raise ValueError(f"no metadata server of GCP: {said[:40]!r}")
        return LEAST_S["gcp"] if said == "TRUE" else None

    def _azure_sign(self) -> None:
        said = self._ask(AZURE_SIGN, {"Metadata": "true"})
        if not said.startswith("Azure"):
            raise ValueError(f"no metadata server of Azure: {said[:40]!r}")

    def _azure(self) -> float | None:
        head = {"Metadata": "true"}
        if not self._name:
            self._name = self._ask(AZURE_NAME, head).strip()
        events = json.loads(self._ask(AZURE, head))["Events"]
        left = [
            seconds_to(parsedate_to_datetime(at)) if (at := event.get("NotBefore")) else 0.0
            for event in events
            if event.get("EventType") in AZURE_ENDS and self._name in event.get("Resources", ())
        ]
        return min(left, default=None)

    def _ask(self, path: str, head: dict[str, str], method: str = "GET") -> str:
        request = urllib.request.Request(self._base + path, headers=head, method=method)
        with self._opener.open(request, timeout=ANSWER_S) as answer:
            return answer.read(1 << 16).decode()


def seconds_to(at: datetime) -> float:
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


class SpotWatch:
    """Asks again and again, in a thread of its own, until the notice has come."""

    def __init__(self, source: SpotSource, tell: Callable[[str, float], None]) -> None:
        """tell: called once, with the cloud and the seconds that are left."""
        self._source, self._tell = source, tell
        self._trouble = ""
        threading.Thread(target=self._watch, name="spot", daemon=True).start()

    def _watch(self) -> None:
        metadata, cloud = Metadata(self._source.url or HOST), self._source.cloud
        if cloud == AUTO:
            cloud = self._find(metadata)
        while True:
            try:
                left_s = metadata.left_s(cloud)
            except NO_ANSWER as error:
                self._note(f"{type(error).__name__}: {error}")
            else:
                self._trouble = ""
                if left_s is not None:
                    log.warning('spot cloud=%s left_s=%.0f reason="it takes us"', cloud, left_s)
                    self._tell(cloud, left_s)
                    return
            time.sleep(ASK_EVERY_S)

    def _find(self, metadata: Metadata) -> str:
        """Until one answers: a machine's own may come up after its workers."""
        pause_s = ASK_EVERY_S
        while not (cloud := metadata.find()):
            self._note(f"none of {', '.join(LEAST_S)} is found")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, FIND_AT_LEAST_EVERY_S)
        return cloud

    def _note(self, trouble: str) -> None:
        """Once: a server that is away says nothing for as long as it is."""
        if trouble != self._trouble:
            log.warning('spot reason="the metadata server does not answer: %s"', trouble)
        self._trouble = trouble
