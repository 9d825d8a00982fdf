"""What models score on the tasks of the LM Evaluation Harness."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_align.api.given import Model, is_plain, take
from hf_align.errors import MissingExtra, OptionError
from hf_align.runtime.devices import Devices

Scores = dict[str, dict[str, float]]
"""Task -> metric -> value, as the harness names them."""


def score(
    models: Mapping[str, Model],
    tasks: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    include_path: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> dict[str, Scores]:
    """Run `lm_eval.simple_evaluate` on each of some models, one after another (Gao et al., zenodo.12608602).

    Args:
        models: by the name that the result has for them: live models, folders or Hub ids.
        tasks: names of tasks or groups of tasks.
        tokenizer: of all models; by default each has that of the folder or repository it was loaded from.
        num_fewshot: examples in the prompt; the task's own number by default.
        limit: examples of each task; all by default.
        batch_size: examples that run at once.
        include_path: a folder of tasks of your own.
        device: where models run; an accelerator if there is one.

    Returns:
        By model, what each task's metrics are, without standard errors.

    Raises:
        MissingExtra: the harness is not installed (`pip install 'hf-align[tasks]'`).
        ValueError: there is no such task or folder, or no tokenizer; models have no names.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingExtra("tasks need the LM Evaluation Harness: pip install 'hf-align[tasks]'") from error
    if isinstance(tasks, str):
        raise OptionError(f"tasks is {tasks!r}; a list of names is needed")
    if not isinstance(models, Mapping):
        raise OptionError("models is one model or a list; a dict of models by their names is needed")
    own = None if include_path is None else os.fspath(include_path)
    if own is not None and not os.path.isdir(own):
        raise OptionError(f"{own} is no folder of tasks")
    manager = TaskManager(include_path=own, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):  # to index the thousands that ship takes a minute
        manager = TaskManager(include_path=own)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise OptionError(f"there is no task called {unknown[0]}; `lm_eval ls tasks` lists them")
    running = str(Devices.choose(device).running)
    found = {}
    for name, model in models.items():
        if is_plain(model):
            raise OptionError(f"{name} is a {type(model).__name__}; tasks run models of transformers")
        live = take(model, called=name).model
        if not isinstance(live, PreTrainedModel):
            raise OptionError(f"{name} is a state dict; tasks run live models, folders and Hub ids")
        words = tokenizer or _tokenizer_of(name, live)
        harness = HFLM(pretrained=live, tokenizer=words, device=running, batch_size=batch_size,
                       prefix_token_id=_first_token(name, live, words))  # fmt: skip
        results = simple_evaluate(harness, tasks=list(tasks), num_fewshot=num_fewshot, limit=limit,
                                  task_manager=manager, log_samples=False, bootstrap_iters=0)  # fmt: skip
        found[name] = {task: _numbers(metrics) for task, metrics in (results or {})["results"].items()}
    return found


def _tokenizer_of(name: str, model: PreTrainedModel) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model.config._name_or_path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise OptionError(f"{name} comes without a tokenizer, which the tasks need") from error


def _first_token(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """What stands before a text that has no context."""
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id, getattr(model.config, "bos_token_id", None))
    for token in known:
        if isinstance(token, int):
            return token
    raise OptionError(f"the tokenizer of {name} has neither a bos nor an eos token")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics, which are named after a filter as well; what else there is counts samples."""
    return {name: float(value) for name, value in metrics.items() if "," in name and isinstance(value, (int, float))}
