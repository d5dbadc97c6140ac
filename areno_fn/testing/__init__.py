"""Public tools to test your own parts with: laws, strategies for property tests, and a strict mode.

    from areno_fn.testing import laws
    from areno_fn.testing.strict import strict

    def test_my_objective() -> None:
        with strict():
            laws.gradient(my_objective, params, batch)

docs/laws.md shows the laws of losses, steps, optimizers and roles at work, docs/adding/model.md those of layouts and checkpoints.
`strategies` needs the package hypothesis; nothing else here does.
"""
