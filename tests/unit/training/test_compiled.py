"""Compiled code needs a compiler, and is told so in one line."""

import pytest

from firecaffe.errors import RecipeError
from firecaffe.training.forward import check_compiler


def test_without_a_compiler_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none_found() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    check_compiler("cuda")
    with pytest.raises(RecipeError, match=r"train\.compile .* C\+\+ compiler .* CXX") as caught:
        check_compiler("cpu")
    assert len(str(caught.value).splitlines()) == 1
