from sympy.core import Add, Expr, Mul, Pow, S, Symbol, sympify
from sympy.core.numbers import Integer, Rational


def collect_powers(expr):
    """
    Combine powers of the same base in a product.

    Examples
    ========

    >>> from sympy.abc import x, y
    >>> collect_powers(x**2*x*y)
    x**3*y

    """
    expr = sympify(expr)
    if not expr.is_Mul:
        return expr
    powers = {}
    for arg in expr.args:
        base, exp = arg.as_base_exp()
        powers[base] = powers.get(base, S.Zero) + exp
    return Mul(*[Pow(base, exp) for base, exp in powers.items()])


def remove_zeros(expr):
    """
    Remove terms that are zero from a sum and products that contain a zero.

    Examples
    ========

    >>> from sympy.abc import x
    >>> remove_zeros(x + 0)
    x

    """
    expr = sympify(expr)
    if expr.is_Add:
        args = [remove_zeros(arg) for arg in expr.args]
        return Add(*[arg for arg in args if not arg.is_zero])
    if expr.is_Mul: