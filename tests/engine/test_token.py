"""The token of Ray's clusters is its owner's alone."""

from raysim.engine.connection import dashboard_sentence, protect_token


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


def test_the_dashboard_s_sentence_says_where_a_token_lies_if_one_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert dashboard_sentence("127.0.0.1:8265") == "Ray's dashboard: http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert dashboard_sentence("127.0.0.1:8265").endswith(f", by the token in {tmp_path / 'token'}")
