"""Two ranks on this machine: a test file runs itself as both, and its tests ask what they have found.

A worker is ``python test_file.py KIND FOLDER``. It runs all jobs of a kind in one process group, which takes seconds to
set up, and writes the result of each as a line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_amp_plus

TIME_LIMIT = 120  # seconds for all jobs of a kind, which take a tenth of it on two free cores

Result = dict[str, Any]


class Ranks:
    """Answers what the two ranks found in a job. A job that hung, and all after it, have found nothing."""

    def __init__(self, script: str, folders: pytest.TempPathFactory) -> None:
        self._script, self._folders = script, folders
        self._results: dict[str, dict[str, list[Result]]] = {}
        self._errors: dict[str, str] = {}

    def __call__(self, kind: str, job: str) -> list[Result]:
        if kind not in self._results:
            self._run(kind)
        both = self._results[kind].get(job, [])
        assert len(both) == 2, f"{len(both)} of 2 ranks came to an end: {self._errors[kind]}"
        for result in both:
            assert "error" not in result, result["error"]
        return both

    def _run(self, kind: str) -> None:
        folder = self._folders.mktemp(kind)
        processes = self._start(kind, folder)
        self._errors[kind] = ""
        end = time.monotonic() + TIME_LIMIT
        for process in processes:
            try:
                self._errors[kind] += process.communicate(timeout=max(end - time.monotonic(), 1))[1][-2000:]
            except subprocess.TimeoutExpired:
                self._errors[kind] += f"no end after {TIME_LIMIT} s"
        for process in processes:
            process.kill()
        results = self._results[kind] = {}
        for rank in "01":
            with suppress(FileNotFoundError), open(folder / f"{rank}.jsonl") as file:
                for job, result in map(json.loads, file):
                    results.setdefault(job, []).append(result)

    def _start(self, kind: str, folder: Path) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        paths = [str(Path(lightning_amp_plus.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": "2",
            "NODE_RANK": "0",
        }
        command = [sys.executable, self._script, kind, str(folder)]
        options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
        return [subprocess.Popen(command, env={**environment, "LOCAL_RANK": rank}, **options) for rank in "01"]


def work(jobs: Callable[[Any], Iterable[tuple[str, Callable[[], Result]]]]) -> None:
    """Run the jobs of the kind that the command line names, as one of the ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    for name, job in jobs(kind):
        try:
            result = job()
        except Exception:
            result = {"error": traceback.format_exc()[-2000:]}
        with open(folder / f"{os.environ['LOCAL_RANK']}.jsonl", "a") as file:
            file.write(json.dumps([name, result]) + "\n")
