"""Tensors that are on another stage: what needs their values raises, all else goes on by shape."""

import pytest
import torch
from torch import nn

from workers.parallel.pipeline.absent import (
    Absent,
    Drawing,
    NotHere,
    absent,
    absent_parameter,
    watched_by,
)

CPU = torch.device("cpu")
HERE = torch.ones(3, 4)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: bool(x.sum()),
        lambda x: float(x.sum()),
        lambda x: int(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.sum().item() > 0,
        lambda x: x.sum().item() == 0,
        lambda x: int(x.sum().item() * 2 + 1),
        lambda x: 1 if x.sum().item() else 2,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: HERE.add_(x),
        lambda x: HERE.copy_(x),
        lambda x: HERE.__setitem__(0, x[0]),
        lambda x: torch.add(x, x, out=HERE),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: 1.0 in x,
        lambda x: torch.ones(3)[x[0, 0].long()],
        lambda x: list(range(x.sum().long())),
        lambda x: [0, 1][x.sum().long()],
        lambda x: torch.nn.init.normal_(x) if x.isnan().any() else None,
        lambda x: torch.repeat_interleave(HERE[0], x[0].long()),
        lambda x: torch.masked_select(HERE, x > 0),
        lambda x: nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True),
        lambda x: __import__("pickle").dumps(x),
    ],
)
def test_what_needs_a_value_raises(use):
    before = HERE.clone()
    with pytest.raises((NotHere, TypeError)):
        use(absent((3, 4), torch.float32, CPU))
    assert torch.equal(HERE, before)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.dropout(x, 0.3, True),
        lambda x: torch.native_dropout(x, 0.3, True),
        lambda x: nn.functional.alpha_dropout(x, 0.3, True),
        lambda x: nn.functional.feature_alpha_dropout(x, 0.3, True),
        lambda x: nn.functional.dropout1d(x, 0.3, True),
        lambda x: nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None],
                                                             dropout_p=0.3),
        lambda x: nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
        lambda x: torch.bernoulli(x),
        lambda x: torch.empty_like(x).bernoulli_(x),
        lambda x: torch.empty_like(x).bernoulli_(0.3),
        lambda x: torch.empty_like(x).uniform_(-1, 1),
        lambda x: torch.empty_like(x).exponential_(),
        lambda x: torch.empty_like(x).cauchy_(),
        lambda x: torch.empty_like(x).geometric_(0.3),
        lambda x: torch.empty_like(x).log_normal_(),
        lambda x: torch.empty_like(x).normal_(),
        lambda x: torch.empty_like(x).random_(),
        lambda x: torch.normal(x, x),
        lambda x: torch.normal(x, 2.0),
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x),
        lambda x: torch.randn_like(x.mT),
        lambda x: torch.randn_like(x[:1, :3]),
        lambda x: torch.randint_like(x, 5),
        lambda x: nn.functional.rrelu(x - 0.5, training=False),
        lambda x: nn.functional.gumbel_softmax(x),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(3, 4), (5, 41)])
def test_a_draw_for_another_stage_leaves_the_generator_as_the_real_one_does(draw, shape):
    values = torch.rand(shape)
    torch.manual_seed(3)
    draw(values)
    wanted = torch.rand(7)
    torch.manual_seed(3)
    with watched_by(Drawing()):
        draw(absent(shape, torch.float32, CPU))
    assert torch.equal(torch.rand(7), wanted)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: nn.functional.rrelu(x, training=True), "rrelu_with_noise"),
        (lambda x: nn.functional.rrelu_(x, training=True), "rrelu_with_noise_"),
        (lambda x: torch.poisson(x), "poisson"),
        (lambda x: torch.binomial(x, x), "binomial"),
        (lambda x: torch.multinomial(x, 2), "multinomial"),
        (lambda x: torch._standard_gamma(x), "_standard_gamma"),
    ],
)
def test_a_draw_that_follows_the_values_is_refused_by_name(draw, name):
    says = f"calls {name} on a tensor that is on another stage, and how many random numbers"
    with watched_by(Drawing()), pytest.raises(NotHere, match=says):
        draw(absent((3, 4), torch.float32, CPU))


def test_a_number_that_is_not_here_makes_numbers_and_tensors_that_are_not():
    x = absent((3, 4), torch.float32, CPU)
    number = x.sum().item()
    for made in (number // 2, 2 % number, 1 - number, -number, number**number):
        with pytest.raises(NotHere):
            bool(made > 1)
    for made in (number * x, x / number, 1 - number * x):
        assert isinstance(made, Absent)
        assert made.shape == (3, 4)
    assert (number * HERE).isnan().all()


def test_what_needs_a_shape_only_goes_on_with_it():
    x = absent((3, 4), torch.float32, CPU)
    layer = nn.Linear(4, 5)
    layer._parameters["weight"] = absent_parameter(layer.weight, "weight")
    y = layer(HERE)
    assert (y.shape, y.dtype, y.requires_grad) == ((3, 5), torch.float32, True)
    assert isinstance(y, Absent)
    z = (x.half() @ torch.ones(4, 2).half()).transpose(0, 1)
    assert (z.shape, z.stride(), z.dtype) == ((2, 3), (1, 2), torch.float16)
    assert x.add_(HERE) is x
    assert isinstance(x.detach(), Absent)
    assert x.new_zeros(2).shape == (2,)
    with pytest.raises(RuntimeError):
        x @ torch.ones(5, 2)
