"""What a process of the fixture `ranks` runs, with `task` given by runpy: a job as one of several ranks."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import torch

task: dict[str, Any] = globals()["task"]

torch.set_num_threads(1)
rank, size = task["rank"], task["size"]
if size > 1:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task["port"])}
found = runpy.run_path(task["jobs"])[task["job"]](*task["given"])
torch.save(found, Path(task["out"]) / f"{rank}.pt")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
