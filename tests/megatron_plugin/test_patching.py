"""Construction hooks and replacement of symbols."""

import copy
import inspect
import pickle
import sys
import types

import pytest

from ditron_train.megatron.plugin import patching


@pytest.fixture(autouse=True)
def _undo():
    yield
    patching.undo_all()


class _Native:
    def __init__(self, value):
        self.value = value


class _Ours(_Native):
    pass


def _make_classes():
    class Native:
        def __init__(self, value, *, flag=False):
            self.value, self.flag = value, flag

    class Ours(Native):
        pass

    class Sibling(Native):
        pass

    return Native, Ours, Sibling


def test_construction_is_redirected_for_every_alias_and_taken_back():
    native, ours, sibling = _make_classes()
    alias = native
    patching.redirect_construction(native, ours)
    patching.redirect_construction(native, ours)
    built = alias(3, flag=True)
    assert type(built) is ours and built.value == 3 and built.flag
    assert type(sibling(1)) is sibling
    assert type(ours(1)) is ours
    assert type(copy.deepcopy(built)) is ours
    assert patching.is_redirected(native)
    patching.undo_all()
    patching.undo_all()
    assert type(native(4)) is native and native(4).value == 4
    assert type(ours(1)) is ours
    assert not patching.is_redirected(native)
    patching.redirect_construction(native, ours)
    assert type(native(5)) is ours


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda built: pickle.loads(pickle.dumps(built))])
def test_a_copy_of_what_was_built_before_stays_native(duplicate):
    patching.redirect_construction(_Native, _Ours)
    ours = _Native(1)
    patching.undo_all()
    native = _Native(2)
    patching.redirect_construction(_Native, _Ours)
    assert type(duplicate(native)) is _Native and duplicate(native).value == 2
    assert type(duplicate(ours)) is _Ours and duplicate(ours).value == 1


def test_class_with_a_constructor_of_its_own():
    class Native:
        def __new__(cls, value):
            instance = object.__new__(cls)
            instance.made_by_new = value
            return instance

        def __init__(self, value):
            self.value = value

    class Ours(Native):
        pass

    patching.redirect_construction(Native, Ours)
    built = Native(2)
    assert type(built) is Ours and built.made_by_new == built.value == 2


def test_signatures_stay_those_of_native():
    native, ours, sibling = _make_classes()
    before = [inspect.signature(one) for one in (native, ours, sibling)]
    patching.redirect_construction(native, ours)
    assert [inspect.signature(one) for one in (native, ours, sibling)] == before
    patching.undo_all()
    assert [inspect.signature(one) for one in (native, ours, sibling)] == before


def test_refuses_strangers_and_second_owners():
    native, ours, sibling = _make_classes()
    with pytest.raises(TypeError, match="not a subclass"):
        patching.redirect_construction(native, int)
    patching.redirect_construction(native, ours)
    with pytest.raises(RuntimeError, match="already redirected"):
        patching.redirect_construction(native, sibling)


def test_symbols_are_replaced_under_every_name_in_the_package_only(monkeypatch):
    def native():
        return "native"

    def ours():
        return "ours"

    inside = types.ModuleType("fakepackage.inside")
    outside = types.ModuleType("fakepackages")
    inside.first, inside.second, outside.first = native, native, native
    monkeypatch.setitem(sys.modules, "fakepackage.inside", inside)
    monkeypatch.setitem(sys.modules, "fakepackages", outside)
    assert patching.replace_symbol(native, ours, package="fakepackage") == 2
    assert patching.replace_symbol(native, ours, package="fakepackage") == 0
    assert inside.first is ours and inside.second is ours and outside.first is native
    inside.second = len  # bound by someone else in the meantime
    patching.undo_all()
    assert inside.first is native and inside.second is len
