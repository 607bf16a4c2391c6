from datetime import date, timedelta

import pytest

from triptych.training.dates import FIRST, LAST, LOCALES, generate_dates, locale_formats, split_dates
from triptych.training.errors import UserError

SEED = 1


def test_every_format_is_for_training_or_held_out():
    task = split_dates(SEED)
    seen = {(way.locale, way.pattern.pattern) for way in task.formats}
    held_out = {(way.locale, way.pattern.pattern) for way in task.held_out_formats}
    assert not seen & held_out
    assert {locale for locale, _ in held_out} == {locale for locale, _ in seen} == set(LOCALES)
    assert seen | held_out == {(locale, way.pattern.pattern) for locale in LOCALES for way in locale_formats(locale)}


def test_held_out_days_never_occur_in_training():
    task = split_dates(SEED)
    assert not set(task.validation_days) & set(task.test_days)
    train = set(generate_dates("train", 30000, SEED)["target"])
    for split in ("validation", "test_dates", "test_formats"):
        targets = set(generate_dates(split, 500, SEED)["target"])
        assert len(targets) > 300
        assert not targets & train


def test_splits_use_the_formats_they_name():
    task = split_dates(SEED)
    for split, formats in (("test_dates", task.formats), ("test_formats", task.held_out_formats)):
        for row in generate_dates(split, 100, SEED):
            day = date.fromisoformat(row["target"])
            assert row["source"] in {way.write(day) for way in formats}


def test_targets_are_iso_dates_in_range():
    for target in generate_dates("train", 2000, SEED)["target"]:
        day = date.fromisoformat(target)
        assert FIRST <= day <= LAST
        assert day.isoformat() == target


def test_a_source_has_one_target():
    task = split_dates(SEED)
    days = [date(2012, 1, 1) + timedelta(days=offset) for offset in range(0, 366)]
    targets = {}
    for way in task.formats + task.held_out_formats:
        for day in days:
            assert targets.setdefault(way.write(day), day) == day


def test_known_dates_in_some_languages():
    day = date(2021, 3, 5)
    written = {way.write(day) for locale in ("de", "en_GB", "en_US", "ja") for way in locale_formats(locale)}
    assert {"de: Freitag, 5. März 2021", "en-US: 3/5/2021", "en-GB: 05/03/2021", "ja: 2021年3月5日"} <= written
    assert not any(text.endswith("/21") for text in written)


def test_the_seed_decides_everything():
    first, second, other = (generate_dates("train", 50, seed)[:] for seed in (1, 1, 2))
    assert first == second != other
    held_out = [split_dates(seed).held_out_formats for seed in (1, 1, 2)]
    assert held_out[0] == held_out[1] != held_out[2]


def test_an_unknown_split_is_named():
    with pytest.raises(UserError, match="dates split 'test_date' is unknown: did you mean 'test_dates'"):
        generate_dates("test_date", 5, SEED)
