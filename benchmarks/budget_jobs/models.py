"""All models that are trained under a budget."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import planner_models
from torch import Tensor

# Importing these two modules fills MODELS.
from budget_jobs import models_by_layer, models_by_shape  # noqa: F401
from budget_jobs.model_job import MODELS, Made, ModelJob
from budget_jobs.models_of_transformers import HUGGING_FACE, of_transformers


def of_planner(name: str) -> Callable[[], Made]:
    def made() -> Made:
        found = planner_models.MODELS[name](True)
        return found.module, found.loss

    return made


def of_tests(name: str) -> Callable[[], Made]:
    def made() -> Made:
        from ebb_tests.programs import real_models

        family = real_models.FAMILIES[name]
        module = family.build()

        def loss() -> Tensor:
            found = module(**family.batch())
            return found if isinstance(found, Tensor) else found.loss

        return module, loss

    return made


def model_jobs() -> Iterator[tuple[str, type[ModelJob]]]:
    """Yields the name of each model and a job that trains it."""
    found = dict(MODELS)
    found |= {f"planner: {name}": (of_planner(name), ModelJob) for name in planner_models.MODELS}
    if find_spec("transformers"):
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
        from transformers.utils import logging

        from ebb_tests.programs import real_models

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        found |= {f"tests: {one}": (of_tests(one), ModelJob) for one in real_models.FAMILIES}
        found |= {f"transformers: {one}": (of_transformers(one), ModelJob) for one in HUGGING_FACE}
    for name, (made, job) in found.items():
        yield name, type("ModelJob", (job,), {"made": staticmethod(made)})
