"""The token of Ray's clusters is its owner's alone."""

from raysim.engine.token import protect_token


def test_the_token_is_closed_to_others(tmp_path, monkeypatch):
    token = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    protect_token()  # where there is none
    assert not token.exists()
    token.write_text("secret")
    token.chmod(0o644)
    protect_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() == "secret"
