"""The worker of ``policy_accuracy.py``: its model is the one that the kills are drawn for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.accuracy_runs import GRADIENTS
from benchmarks.workers.accuracy import DEVIATION, MEAN, Digits, digest, make_model, right_answers


def digits(count: int) -> Digits:
    """Images of one brightness each, from black on; the labels count."""
    images = np.zeros((count, 28, 28), np.uint8) + np.arange(count, dtype=np.uint8)[:, None, None]
    return Digits(images, np.arange(count, dtype=np.uint8) % 10)


def test_a_kill_can_come_after_each_of_its_gradients() -> None:
    assert len(list(make_model().parameters())) == GRADIENTS


def test_samples_are_normalized_and_come_as_they_are_asked_for() -> None:
    images, labels = digits(20).__getitems__([13, 2])
    assert images.shape == (2, 1, 28, 28)
    assert images[0, 0, 0, 0].item() == pytest.approx((13 / 255 - MEAN) / DEVIATION)
    assert labels.tolist() == [3, 2]


def test_right_answers_are_counted_over_all_images() -> None:
    class Three(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(torch.full((len(images),), 3), 10)

    assert right_answers(Three(), digits(250)) == 25


def test_the_digest_tells_models_apart_that_differ_in_one_weight() -> None:
    torch.manual_seed(1)
    model = make_model()
    before = digest(model)
    assert digest(model) == before
    with torch.no_grad():
        next(model.parameters())[0] += 1e-6
    assert digest(model) != before
