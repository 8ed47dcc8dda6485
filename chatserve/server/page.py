"""The browser page: `/` and `/static/…`, from the repository's `web` folder or the installed copy of it.

Owns the content security policy: scripts and styles come from this server alone and none stands in the page, so that
nothing that a message or a title holds can ever run.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

import chatserve


def find_web_dir() -> Path | None:
    package = Path(chatserve.__file__).resolve().parent
    for folder in (package / "web", package.parent / "web"):
        if (folder / "index.html").is_file():
            return folder
    return None


def content_security_policy(host: str) -> str:
    """`host` is the request's own, which the gate has let pass: not every browser counts sockets into 'self'."""
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "font-src 'self'",
            f"connect-src 'self' ws://{host} wss://{host}",
            "manifest-src 'self'",
            # Text becomes markup in one place alone, which is the sanitizer's.
            "require-trusted-types-for 'script'",
            "trusted-types dompurify",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def page_routes(web_dir: Path | None) -> list[BaseRoute]:
    if web_dir is None:
        return [Route("/", _no_page, methods=["GET"])]
    index = web_dir / "index.html"

    async def page(request: Request) -> Response:
        policy = content_security_policy(request.headers["host"])
        return FileResponse(index, headers={"content-security-policy": policy, "cache-control": "no-cache"})

    static: ASGIApp = _Revalidated(directory=web_dir)
    return [Route("/", page, methods=["GET"]), Mount("/static", app=static, name="static")]


class _Revalidated(StaticFiles):
    """A browser asks each time whether its copy is current: an updated server is never met by an old page."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["cache-control"] = "no-cache"
        return response


async def _no_page(_request: Request) -> Response:
    return PlainTextResponse("This installation has no browser page. The socket is at /ws.\n", 404)
