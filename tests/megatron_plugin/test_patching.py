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


class _Fused(_Native):
    pass


def _make_classes():
    class Native:
        def __init__(self, value, *, flag=False):
            self.value, self.flag = value, flag

    class Fused(Native):
        pass

    class Sibling(Native):
        pass

    return Native, Fused, Sibling


def test_construction_is_redirected_for_every_alias_and_taken_back():
    native, fused, sibling = _make_classes()
    alias = native
    patching.redirect_construction(native, fused)
    patching.redirect_construction(native, fused)
    built = alias(3, flag=True)
    assert type(built) is fused and built.value == 3 and built.flag
    assert type(sibling(1)) is sibling
    assert type(fused(1)) is fused
    assert type(copy.deepcopy(built)) is fused
    assert patching.is_redirected(native)
    patching.undo_all()
    patching.undo_all()
    assert type(native(4)) is native and native(4).value == 4
    assert type(fused(1)) is fused
    assert not patching.is_redirected(native)
    patching.redirect_construction(native, fused)
    assert type(native(5)) is fused


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda built: pickle.loads(pickle.dumps(built))])
def test_a_copy_of_what_was_built_before_stays_native(duplicate):
    patching.redirect_construction(_Native, _Fused)
    fused = _Native(1)
    patching.undo_all()
    native = _Native(2)
    patching.redirect_construction(_Native, _Fused)
    assert type(duplicate(native)) is _Native and duplicate(native).value == 2
    assert type(duplicate(fused)) is _Fused and duplicate(fused).value == 1


def test_class_with_a_constructor_of_its_own():
    class Native:
        def __new__(cls, value):
            instance = object.__new__(cls)
            instance.made_by_new = value
            return instance

        def __init__(self, value):
            self.value = value

    class Fused(Native):
        pass

    patching.redirect_construction(Native, Fused)
    built = Native(2)
    assert type(built) is Fused and built.made_by_new == built.value == 2


def test_signatures_stay_those_of_native():
    native, fused, sibling = _make_classes()
    before = [inspect.signature(one) for one in (native, fused, sibling)]
    patching.redirect_construction(native, fused)
    assert [inspect.signature(one) for one in (native, fused, sibling)] == before
    patching.undo_all()
    assert [inspect.signature(one) for one in (native, fused, sibling)] == before


def test_refuses_strangers_and_second_owners():
    native, fused, sibling = _make_classes()
    with pytest.raises(TypeError, match="not a subclass"):
        patching.redirect_construction(native, int)
    patching.redirect_construction(native, fused)
    with pytest.raises(RuntimeError, match="already redirected"):
        patching.redirect_construction(native, sibling)


def test_symbols_are_replaced_under_every_name_in_the_package_only(monkeypatch):
    def native():
        return "native"

    def fused():
        return "fused"

    inside = types.ModuleType("fakepackage.inside")
    outside = types.ModuleType("fakepackages")
    inside.first, inside.second, outside.first = native, native, native
    monkeypatch.setitem(sys.modules, "fakepackage.inside", inside)
    monkeypatch.setitem(sys.modules, "fakepackages", outside)
    assert patching.replace_symbol(native, fused, package="fakepackage") == 2
    assert patching.replace_symbol(native, fused, package="fakepackage") == 0
    assert inside.first is fused and inside.second is fused and outside.first is native
    inside.second = len  # bound by someone else in the meantime
    patching.undo_all()
    assert inside.first is native and inside.second is len
