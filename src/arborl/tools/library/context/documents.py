"""Tools to work through a document that does not fit the context: look, index, read a chunk, search.

The document is the task's `document_content`; the model never sees it except through these.
"""

from __future__ import annotations

from typing import Any, Literal

from arborl.tools.injection import Context
from arborl.tools.library.context.chunks import cut_into_chunks, highlights
from arborl.tools.library.context.workspace import FIELD, Index, Refused, Shared, json_tool
from arborl.tools.library.finish import finish as plain_finish

INDEX_ID = "document_index"
FILE_NAME = "attached_document.txt"


@json_tool("analyzeText", timeout=60)
def analyze_text(space: Shared, context: Context) -> dict[str, Any]:
    """Get the length of the document in tokens."""
    text = space.text(context)
    tokens = space.index.tokens if space.index else cut_into_chunks(text, 1 << 60, 0, context.tokenizer)[1]
    return {"file_name": FILE_NAME, "total_tokens": tokens}


@json_tool("loadDocument")
async def load_document(space: Shared, context: Context) -> dict[str, Any]:
    """Read the whole document at once. It may not fit your context."""
    return {FIELD: space.text(context)}


@json_tool("buildIndex", timeout=120)
def build_index(
    space: Shared, context: Context, chunk_size: int | None = None, overlap: int | None = None
) -> dict[str, Any]:
    """Cut the document into chunks and index them.

    Args:
        chunk_size: tokens of a chunk.
        overlap: tokens that a chunk shares with the one before it.
    """
    reading = space.reading
    size, shared = chunk_size if chunk_size is not None else reading.chunk_size, overlap
    if shared is None:
        shared = reading.overlap if chunk_size is None else 0
    index = space.build(space.text(context), size, shared, context.tokenizer)
    return {"index_id": INDEX_ID, "total_chunks": len(index), "first_chunk_id": 0, "last_chunk_id": len(index) - 1}


@json_tool("readChunk")
async def read_chunk(
    space: Shared, context: Context, chunk_id: int | None = None, enable_scan: bool | None = None
) -> dict[str, Any]:
    """Read one chunk of the document.

    Args:
        chunk_id: its number.
        enable_scan: true reads the chunks one after the other, without chunk_id, until false.
    """
    space.text(context)
    index = space.built()
    if enable_scan is not None:
        space.scanning = enable_scan
    if chunk_id is None and not space.scanning:
        raise Refused("give chunk_id, or enable_scan=true")
    wanted = space.at + 1 if chunk_id is None else chunk_id
    _check_range(wanted, index, chunk_id is None)
    space.at = wanted
    begin, end = index.spans[wanted]
    chunk = {"chunk_id": wanted, "content": index.content(wanted), "start_pos": begin, "end_pos": end}
    progress = {"reading_progress": f"{wanted + 1}/{len(index)}"} if space.scanning else {}
    return {"retrieved_chunk": [chunk], "chunk_id": wanted} | progress


def _check_range(wanted: int, index: Index, scanned: bool) -> None:
    if not 0 <= wanted < len(index):
        if scanned:
            raise Refused(f"all {len(index)} chunks have been read")
        raise Refused(f"chunk_id={wanted}: give 0 to {len(index) - 1}")


@json_tool("searchEngine", timeout=60)
def search_engine(keyword: str, space: Shared, context: Context, mode: Literal["or", "and"] = "or") -> dict[str, Any]:
    """Find the chunks that match keywords.

    Args:
        keyword: keywords, separated by commas.
        mode: a chunk matches any of them (or) or all (and).
    """
    space.text(context)
    index, reading = space.built(), space.reading
    keywords = [part.strip() for part in keyword.split(",") if part.strip()]
    if not keywords:
        raise Refused("the keyword is empty")
    space.searched.extend(one for one in keywords if one not in space.searched)
    total, hits = index.search(keywords, mode, reading.results, marked=reading.fragments > 0)
    found: dict[str, Any] = {
        "retrieved_chunks": [
            {
                "chunk_id": hit.chunk,
                "relevance_score": round(hit.score, 4),
                "highlights": highlights(hit.marked, reading.fragment_size, reading.fragments),
            }
            for hit in hits
        ],
        "keywords": keywords,
    }
    if not hits:
        found["message"] = "No matching content found."
    elif total > len(hits):
        found["message"] = f"Showing the most relevant {len(hits)}/{total} chunks."
    return found


finish = json_tool("finish", stateful=False, terminal=True, description=plain_finish.spec.description)(
    plain_finish.function
)
"""The library's `finish`, with failures as JSON."""
