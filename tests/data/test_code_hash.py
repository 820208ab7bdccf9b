import types

import numpy as np
import pytest

from tfdist.data.code_hash import hash_code

CODE = """
import functools
import helpers
LIMIT = 3
NAMES = frozenset({"a", "b", "c"})
def scale(x):
    return x * 2
def wrap(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call
class Base:
    def shift(self, x):
        return x + 1
class Mine(Base):
    size = 4
    @wrap
    def load(self, x, more=5):
        return scale(x) + (lambda y: y + LIMIT)(x) + helpers.twist(x) + (x in NAMES)
    @property
    def spec(self):
        return 6
    @staticmethod
    def make():
        return 7
"""
HELPERS = """
def twist(x):
    return x - 8
def other(x):
    return x - 9
"""


def make_class(code=CODE, helpers=HELPERS):
    modules = {}
    for name, text in (("mine.helpers", helpers), ("mine", code)):
        modules[name] = module = types.ModuleType(name)
        if name == "mine":
            text = text.replace("import helpers", "")
            module.helpers = modules["mine.helpers"]
        exec(text, vars(module))
    return modules["mine"].Mine


def test_the_same_code_has_the_same_digest():
    assert hash_code(make_class()) == hash_code(make_class())
    commented = CODE.replace("return x * 2", "return x * 2  # twice")
    assert hash_code(make_class(commented)) == hash_code(make_class())
    unused = HELPERS.replace("x - 9", "x - 10")
    assert hash_code(make_class(helpers=unused)) == hash_code(make_class())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * 2", "x * 3"),
        ("x + 1", "x + 2"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("size = 4", "size = 5"),
        ("more=5", "more=6"),
        ("return 6", "return 7"),
        ("return 7", "return 8"),
        ('"c"}', '"d"}'),
        ("y + LIMIT", "y - LIMIT"),
        ("class Mine", "class Mine2(Base): pass\nclass Mine"),
        ("x - 8", "x - 7"),
    ],
)
def test_changed_code_has_another_digest(old, new):
    code, helpers = CODE.replace(old, new), HELPERS.replace(old, new)
    assert (code, helpers) != (CODE, HELPERS)
    changed = hash_code(make_class(code, helpers)) != hash_code(make_class())
    assert changed == ("Mine2" not in new)


def test_what_methods_close_over_counts():
    def make(value):
        class Mine:
            def load(self):
                return value

        return Mine

    assert hash_code(make(1)) != hash_code(make(2))
    arrays = [np.arange(3), np.arange(3), np.arange(3) + 1]
    one, same, other = (hash_code(make(array)) for array in arrays)
    assert one == same != other
    state = []
    before = hash_code(make(state))
    state.append(1)
    assert hash_code(make(state)) == before


@pytest.mark.thorough
def test_other_processes_find_the_same(last_lines_of):
    code = (
        "from tfdist.tasks.segmentation.folder import FolderSource\n"
        "from tfdist.data.code_hash import hash_code\n"
        "print(hash_code(FolderSource))"
    )
    assert len(set(last_lines_of(code))) == 1
