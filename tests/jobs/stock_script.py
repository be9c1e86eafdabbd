"""A script written for stock Horovod elastic, as its documentation shows; only the import is ours.

``python -m tests.jobs.stock_script FOLDER`` trains with commits every third batch; worker 1 kills itself between two.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import horovod_ft.torch as hvd

FOLDER = Path(sys.argv[1])
START_RANK = int(os.environ["HOROVOD_RANK"])
EPOCHS, BATCH, SAMPLES, COMMIT_EVERY = 3, 4, 96, 3

hvd.init()
torch.manual_seed(1)
inputs = torch.randn(SAMPLES, 5)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def weights() -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
        momentum = optimizer.state[parameter].get("momentum_buffer")
        if momentum is not None:
            digest.update(momentum.numpy().tobytes())
    return digest.hexdigest()


def note(kind: str, state: Any) -> None:
    record = {
        "kind": kind, "epoch": state.epoch, "batch": state.batch, "processed": sampler.processed_num,
        "size": hvd.size(), "replicas": sampler.num_replicas, "lr": optimizer.param_groups[0]["lr"],
        "weights": weights(),
    }  # fmt: skip
    with (FOLDER / f"notes-{START_RANK}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@hvd.elastic.run
def train(state: Any) -> str:
    note("enter", state)
    for epoch in range(state.epoch, EPOCHS):
        for batch, (x, y) in enumerate(loader, start=state.batch):
            if START_RANK == 1 and epoch == 1 and batch == 4 and hvd.size() == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            sampler.record_batch(batch, BATCH)
            state.batch = batch + 1
            if state.batch % COMMIT_EVERY == 0:
                note("commit", state)
                state.commit()
        state.epoch, state.batch = epoch + 1, 0
        sampler.set_epoch(state.epoch)
        note("commit", state)
        state.commit()
    note("end", state)
    return "done"


def reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([reset])
assert train(state) == "done"
