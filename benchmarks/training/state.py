"""State of a training, as a checkpoint holds it."""

from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator
from pytorch_metric_learning.losses import CrossBatchMemory
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.building.network import batch_norms
from pml_regularizers import prepare_loss


@dataclass(eq=False)
class TrainingState:
    """The parts of a training, and how far it is: saved and restored together.

    A step is a function of the seed and its number, so the parts include no generator and no sampler.
    """

    model: Any  # an `EmbeddingModel`; this, loss and optimizer are wrapped by `prepare`
    loss: Any
    optimizer: Any
    scheduler: LRScheduler | None
    step: int = 0  # number of steps done
    seconds: float = 0.0  # since the start, including evaluations and checkpoints
    busy_seconds: float = 0.0  # in training steps only
    stopped_by: int | None = None  # the signal
    accelerator: Accelerator = field(init=False, repr=False)  # from `prepare` on

    def prepare(self, accelerator: Accelerator) -> None:
        """Move the parts to their device, and let them work with those of other processes."""
        model = self.model
        if accelerator.num_processes > 1 and any(norm.training for norm in batch_norms(model)):
            # Unlike torch's function, timm's keeps the activation inside its layers.
            model = convert_sync_batchnorm(model)
            if model.frozen_stages is not None:
                model.frozen_stages.cut()
        self.accelerator, self.loss = accelerator, prepare_loss(self.loss, accelerator)
        self.model, self.optimizer = accelerator.prepare(model, self.optimizer)

    def weights(self) -> dict[str, Any]:
        """Weights of the network and of the loss."""
        return {
            "model": self.accelerator.unwrap_model(self.model).state_dict(),
            "loss": self.accelerator.unwrap_model(self.loss).state_dict(),
        }

    def load_weights(self, saved: dict[str, Any]) -> None:
        """Load what `weights` returned."""
        self.accelerator.unwrap_model(self.model).load_state_dict(saved["model"])
        self.accelerator.unwrap_model(self.loss).load_state_dict(saved["loss"])

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, progress, and the places in PML's cross-batch memories."""
        scaler = self.accelerator.scaler
        return {
            **self.weights(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "scaler": scaler.state_dict() if scaler else None,
            "seconds": self.seconds,
            "busy_seconds": self.busy_seconds,
            "memories": [
                [memory.queue_idx, memory.has_been_filled] for memory in _memories(self.loss)
            ],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.load_weights(saved)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])
        for memory, place in zip(_memories(self.loss), saved["memories"], strict=True):
            memory.queue_idx, memory.has_been_filled = place
        self.step, self.seconds, self.busy_seconds = (
            saved[name] for name in ("step", "seconds", "busy_seconds")
        )


def _memories(loss: nn.Module) -> list[CrossBatchMemory]:
    """The loss's cross-batch memories, whose places in the queue PML leaves out of the state_dict."""
    return [module for module in loss.modules() if isinstance(module, CrossBatchMemory)]
