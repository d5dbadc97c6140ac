"""Public tools to test your own parts with: laws, strategies for property tests, and a strict mode.

    from areno_fn.testing import laws
    from areno_fn.testing.strict import strict

    def test_my_objective() -> None:
        with strict():
            laws.gradient(my_objective, params, batch)

The laws of layouts, checkpoints and resumed runs are among them; docs/adding/model.md shows them at work.
`strategies` needs the package hypothesis; nothing else here does.
"""
