"""What a worker asks of its node: as text, as Ray's options, and on which nodes that is."""

import re

import pytest

from elastic.config import Resources, RunConfig
from elastic.protocol.placing import matches, parse_amounts, parse_labels

MARKET = "ray.io/market-type"


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("zone=a", ({"zone": "a"},)),
        (f"{MARKET}=spot; {MARKET}=on-demand", ({MARKET: "spot"}, {MARKET: "on-demand"})),
        ("zone=in(a, b),disk=!hdd;any", ({"zone": "in(a, b)", "disk": "!hdd"}, {})),
    ],
)
def test_choices_are_separated_by_semicolons_and_labels_by_commas(text, choices):
    assert parse_labels(text) == choices


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zone",
        "zone=",
        "=a",
        "zone=a;",
        "zone=a,zone=b",
        "zone=-a",
        "zone=in()",
        "zone=a b",
        "x" * 64 + "=a",
    ],
)
def test_labels_that_are_none_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match=f"^labels={re.escape(repr(text))}: .* give such as"):
        Resources(labels=text)


@pytest.mark.parametrize(
    ("wanted", "value", "is_one"),
    [
        ("a", "a", True),
        ("a", None, False),
        ("!a", "a", False),
        ("!a", None, True),
        ("in(a,b)", "b", True),
        ("in(a, b)", "c", False),
        ("!in(a,b)", "c", True),
    ],
)
def test_a_selector_means_what_it_means_to_ray(wanted, value, is_one):
    assert matches({"zone": wanted}, {} if value is None else {"zone": value}) is is_one


def test_resources_are_names_and_amounts():
    assert parse_amounts("TPU=4,disk=0.5") == {"TPU": 4.0, "disk": 0.5}
    for text in ("TPU", "TPU=x", "TPU=0", "TPU=-1", "=1", "TPU=1,TPU=2", ""):
        with pytest.raises(ValueError, match="is no NAME=AMOUNT of a resource"):
            Resources(worker_resources=text)
    with pytest.raises(ValueError, match="CPUs are asked for with cpus_per_worker"):
        Resources(worker_resources="CPU=2")


def test_a_kind_of_accelerator_is_a_name():
    assert Resources(accelerator_type="TPU-V4").accelerator_type == "TPU-V4"
    with pytest.raises(ValueError, match="accelerator_type='A 100' is no name"):
        Resources(accelerator_type="A 100")


def test_what_is_asked_for_becomes_rays_options():
    config = RunConfig(
        steps=1, global_batch=1, micro_batch=1, cpus_per_worker=2, accelerator_type="A100",
        labels=f"{MARKET}=spot; {MARKET}=on-demand; any", worker_resources="disk=1",
    )  # fmt: skip
    assert config.resources.need("cuda").options == {
        "num_cpus": 2,
        "num_gpus": 1,
        "resources": {"disk": 1.0},
        "accelerator_type": "A100",
        "label_selector": {MARKET: "spot"},
        "fallback_strategy": [
            {"label_selector": {MARKET: "on-demand"}},
            {"label_selector": {}},
        ],
    }
    assert Resources().need("cpu").options == {"num_cpus": 1, "num_gpus": 0}
    assert RunConfig.from_json(config.to_json()) == config
