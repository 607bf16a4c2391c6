"""What the package ships as data: model presets, training recipes and launch configurations.

`models/*.json` are model presets, `recipes/*.yaml` are trainings (`triptych train NAME`), and `accelerate/*.yaml`
are launch configurations (`accelerate launch --config_file ...`).
"""

from pathlib import Path

MODELS = Path(__file__).parent / "models"
RECIPES = Path(__file__).parent / "recipes"


def preset_names() -> list[str]:
    """Return the names of the model presets that ship with the package, sorted."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the package, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))
