"""Dates as people write them, in many languages, with the same date in ISO 8601: a translation task without data files.

The ways to write come from the Unicode CLDR through Babel: each locale's four styles (full to short) and its
patterns for year-month-day skeletons. A source names its locale, since 3/5/2021 is March in the United States and
May in Britain:

    de: Freitag, 5. März 2021  ->  2021-03-05

Two things are held out of training: dates (no such day is seen in any language) and formats (one pattern of each
locale). Years have four digits and the calendar is Gregorian, so that every source has exactly one target.
"""

import random
import re
from dataclasses import dataclass
from datetime import date, timedelta

from babel import Locale
from babel.dates import DateTimePattern, get_date_format, parse_pattern
from datasets import Dataset

from triptych.training.errors import unknown_name

LOCALES = [
    "ar", "bg", "ca", "cs", "da", "de", "el", "en_GB", "en_US", "es", "et", "eu", "fa", "fi", "fr",
    "he", "hi", "hr", "hu", "id", "is", "it", "ja", "ko", "lt", "lv", "nb", "nl", "pl", "pt", "ro",
    "ru", "sk", "sl", "sv", "sw", "th", "tr", "uk", "vi", "zh",
]  # fmt: skip
STYLES = ("full", "long", "medium", "short")
SKELETONS = ("yMMMd", "yMMMEd", "yMMMMd", "yMMMMEEEEd", "yMd", "yMEd", "GyMMMd")
FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
HELD_OUT_DATES = 4000
SPLITS = ("train", "validation", "test_dates", "test_formats")


@dataclass(frozen=True)
class Format:
    """One way to write a date: a locale and a CLDR date pattern in it."""

    locale: str
    pattern: DateTimePattern

    def write(self, day: date) -> str:
        """Return `day` in this format, after the locale's name."""
        return f"{self.locale.replace('_', '-')}: {self.pattern.apply(day, self.locale)}"


def locale_formats(locale: str) -> list[Format]:
    """Return every distinct format of one locale, years widened to four digits."""
    known = Locale.parse(locale)
    patterns = [get_date_format(style, known) for style in STYLES]
    patterns += [known.datetime_skeletons[name] for name in SKELETONS if name in known.datetime_skeletons]
    wide = dict.fromkeys(re.sub(r"(?<!y)yy(?!y)", "y", pattern.pattern) for pattern in patterns)
    return [Format(locale, parse_pattern(text)) for text in wide]


@dataclass(frozen=True)
class DateTask:
    """What training may see and what is held out.

    Attributes:
        formats, held_out_formats: every format is in one of the two; the second has one of each locale.
        validation_days, test_days: held-out days, apart from each other; all others are for training.
    """

    formats: list[Format]
    held_out_formats: list[Format]
    validation_days: list[date]
    test_days: list[date]


def split_dates(seed: int) -> DateTask:
    """Draw the held-out formats and days; the same `seed` draws the same."""
    draw = random.Random(f"hold out {seed}")
    formats, held_out = [], []
    for locale in LOCALES:
        ways = locale_formats(locale)
        held_out.append(ways.pop(draw.randrange(len(ways))))
        formats += ways
    days = draw.sample(range((LAST - FIRST).days + 1), HELD_OUT_DATES)
    days = [FIRST + timedelta(days=offset) for offset in days]
    return DateTask(formats, held_out, days[: HELD_OUT_DATES // 2], days[HELD_OUT_DATES // 2 :])


def generate_dates(split: str, size: int, seed: int) -> Dataset:
    """Return `size` pairs of one split: `train`, `validation`, `test_dates` or `test_formats`.

    `test_formats` writes held-out days in held-out formats, the others write in the formats of training.

    Raises:
        UserError: an unknown split.
    """
    if split not in SPLITS:
        raise unknown_name("dates split", split, SPLITS)
    task = split_dates(seed)
    draw = random.Random(f"{split} {seed}")
    held_out = set(task.validation_days + task.test_days)
    formats = task.held_out_formats if split == "test_formats" else task.formats
    days = {"train": None, "validation": task.validation_days}.get(split, task.test_days)
    sources, targets = [], []
    while len(sources) < size:
        day = draw.choice(days) if days else FIRST + timedelta(days=draw.randrange((LAST - FIRST).days + 1))
        if days or day not in held_out:
            sources.append(draw.choice(formats).write(day))
            targets.append(day.isoformat())
    return Dataset.from_dict({"source": sources, "target": targets})
