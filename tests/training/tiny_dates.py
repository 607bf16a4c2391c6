"""Changes that make the recipe of dates a matter of seconds."""

TINY = (
    "data.dates.train=200",
    "data.dates.validation=40",
    "data.dates.test_dates=8",
    "data.dates.test_formats=8",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.hidden_dropout=0.0",
    "max_tokens=1024",
    "learning_rate=3e-3",
    "warmup_steps=2",
    "max_steps=12",
    "log_every=1",
    "validate_every=6",
    "report_to=[]",
)
