"""The shipped workloads do what their docstrings say, without Ray and without a session."""

import math
import pickle

import pytest
import torch

from workers.workloads import charlm
from workers.workloads.charlm import CharLM, OneBitOff, decode, encode, library_text, warmup_cosine


def small() -> CharLM:
    return CharLM(width=32, layers=1, context=16, limit_bytes=50_000)


def batch_of(workload: CharLM, size: int) -> list[torch.Tensor]:
    dataset = workload.dataset()
    return list(torch.utils.data.default_collate([dataset[i] for i in range(size)]))


def test_default_model_has_about_a_million_parameters():
    count = sum(p.numel() for p in CharLM().build_model().parameters())
    assert 0.8e6 < count < 1.2e6


def test_text_is_encoded_without_loss_except_for_unlisted_characters():
    source = "def f(x):\n    return x ** 2  # ~\n"
    assert decode(encode(source.encode())) == source
    assert decode(encode("a\tb\u00e9".encode())) == "a?b??"
    assert int(encode(bytes(range(256))).max()) == charlm.VOCABULARY_SIZE - 1


def test_training_and_validation_text_are_different_files_and_limited():
    train, validation = library_text("train", 30_000), library_text("validation", 10_000)
    assert (len(train), len(validation)) == (30_000, 10_000)
    assert not torch.equal(train[:10_000], validation)
    assert library_text("train", 30_000) is train


def test_a_window_predicts_the_character_that_follows():
    characters, following = small().dataset()[3]
    assert characters.shape == following.shape == (16,)
    assert torch.equal(characters[1:], following[:-1])


def test_no_position_sees_what_follows_it():
    workload = small()
    model = workload.build_model().eval()
    ids = workload.dataset()[0][0].unsqueeze(0)
    changed = ids.clone()
    changed[0, 10:] = 5
    with torch.no_grad():
        assert torch.equal(model(ids)[0, :10], model(changed)[0, :10])


def test_loss_starts_at_the_uniform_guess_and_falls():
    torch.manual_seed(0)
    workload = small()
    model = workload.build_model()
    optimizer = workload.build_optimizer(list(model.parameters()))
    scheduler = workload.build_scheduler(optimizer)
    batch = batch_of(workload, 8)
    losses = []
    for _ in range(40):
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(charlm.VOCABULARY_SIZE), rel=0.1)
    assert losses[-1] < losses[0] - 1


def test_learning_rate_warms_up_and_decays_to_its_floor():
    factor = warmup_cosine(warmup_steps=10, decay_steps=110, floor=0.1)
    assert [factor(0), factor(9), factor(10)] == [0.1, 1.0, 1.0]
    assert factor(60) == pytest.approx(0.55)
    assert factor(110) == factor(10_000) == pytest.approx(0.1)


def test_scheduler_state_has_no_code_in_it():
    optimizer = small().build_optimizer(list(small().build_model().parameters()))
    assert small().build_scheduler(optimizer).state_dict()["lr_lambdas"] == [None, None]


def test_one_bit_off_differs_in_exactly_one_bit():
    def weights(kind):
        torch.manual_seed(0)
        return kind(width=32, layers=1).build_model().state_dict()

    right, wrong = weights(CharLM), weights(OneBitOff)
    assert [name for name in right if not torch.equal(right[name], wrong[name])] == ["head.weight"]
    difference = right["head.weight"].view(torch.int32) ^ wrong["head.weight"].view(torch.int32)
    assert (int(difference.sum()), int(difference.count_nonzero())) == (1, 1)


def test_charlm_travels_by_reference():
    sent = pickle.dumps(small())
    assert len(sent) < 1000
    assert pickle.loads(sent).width == 32


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="multiple of heads, got 30 and 4"):
        CharLM(width=30)
