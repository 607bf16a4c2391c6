"""Known checkpoints come in exactly and go back out."""

from .convert import export_model, import_model

__all__ = ["export_model", "import_model"]
