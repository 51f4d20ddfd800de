"""What a raylet of the tests runs in place of Ray's script that sets a worker up.

The worker comes from the fork server. It is no child of the raylet, which knows it by the pid that
it registers.
"""

import json
import os
import re
import shlex
import sys

from fork_client import ADDRESS, Order, send_to_ray

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def order_of(arguments: list[str], env: dict[str, str]) -> Order:
    """As Ray's script would have executed it, in the environment that Ray has prepared."""
    context = next((a for a in arguments if a.startswith(CONTEXT)), "").removeprefix(CONTEXT)
    prepared = json.loads(context or "{}")
    for name, value in prepared.get("env_vars", {}).items():
        env[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    folder = os.getcwd()
    if prefix := shlex.split(" ".join(prepared.get("command_prefix", ()))):
        command, folder, then = prefix
        assert (command, then) == ("cd", "&&"), prefix
    rest = [a for a in arguments if not a.startswith((CONTEXT, LANGUAGE))]
    return Order(rest, env, folder, os.getpgid(0))  # the raylet ends what is left of the group


if __name__ == "__main__":
    order = order_of(sys.argv[1:], dict(os.environ))
    connection, _ = send_to_ray(os.environ[ADDRESS], order, (0, 1, 2))
