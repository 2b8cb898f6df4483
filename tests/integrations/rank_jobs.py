"""What the processes of test_transformers_ddp.py do; see the fixture `ranks`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import finback.integrations.transformers as hf
from finback.base.runtime import seed_everything


def train(config: dict[str, Any], rows: list[dict[str, list[int]]], batch: int, folder: str) -> dict[str, Any]:
    """Three steps of Hugging Face's Trainer with `batch` rows a process; the mean loss, and the weights."""
    seed_everything(0)
    model = AutoModelForCausalLM.from_config(hf.SpikeWhaleHFConfig(**config))
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=batch, learning_rate=0.1, optim="sgd", use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    loss = trainer.train().training_loss
    wrapped = type(trainer.model_wrapped).__name__
    return {"loss": loss, "wrapped": wrapped, "weights": {k: v.clone() for k, v in model.state_dict().items()}}


torch.set_num_threads(1)
