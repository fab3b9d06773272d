"""The Hugging Face Trainer: `ProfCallback` times the stages of its steps and records a few of them."""

from boundby.integrations.transformers.attachment import Attachment
from boundby.integrations.transformers.callback import ProfCallback

__all__ = ["Attachment", "ProfCallback"]
