"""A run that is served, and pictures to and fro."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from starlette.testclient import TestClient

from boovae.runs.train import load_trainer
from boovae.serve.app import make_app
from boovae.serve.play import Player
from run_folders import content

SAMPLES = 30
ADDRESS = "http://127.0.0.1:8000"


class Served:
    """A run that is served, and its model to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, content(folder)
        run, self.trainer = load_trainer(folder, "cpu")
        with run:
            self.player = Player(run, self.trainer, replica=1, samples=SAMPLES)
        self.client = TestClient(make_app(self.player), base_url=ADDRESS, raise_server_exceptions=False)

    def post(self, path: str, **request: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=request)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def sample(self, **request: Any) -> list[dict[str, Any]]:
        return list(self.post("/api/sample", **request)["images"])

    def look(self, picture: bytes, query: str = "") -> dict[str, Any]:
        answer = self.client.post(f"/api/look{query}", content=picture, headers={"content-type": "image/png"})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def pixels(url: str) -> np.ndarray[Any, Any]:
    """Return the bytes of a picture that came back."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))))


def picture(array: np.ndarray[Any, Any], form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, form, **options)
    return buffer.getvalue()
