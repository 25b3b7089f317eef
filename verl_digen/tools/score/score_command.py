# SPDX-License-Identifier: Apache-2.0
"""Score pictures and videos with any reward, from the shell.

    digen score jpeg_compressibility out/ --prompt ''
    digen score ocr out/ --prompts test.txt
    digen score ocr RUN/images/step_000040
    digen score '{ocr: 1.0, pickscore: {weight: 0.5, path: ~/PickScore_v1}}' a.png b.png --prompt 'a sign "CAT"' --json

A reward is a name, several names with commas, FILE.py:NAME, or a mapping as in digen.reward.functions. A prompt comes
from --prompt, --prompts, a text file beside the picture (NAME.txt), metadata.jsonl in its folder (columns file_name and
prompt), or the run whose validation it is of. Progress goes to stderr, results to stdout.

Exit code 0 if every file has a score, 1 if one has none (the reason is printed), 2 if nothing can be scored.
"""

from argparse import ArgumentParser, Namespace

NAME = "score"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("reward", metavar="REWARD", help="name(s), FILE.py:NAME, or {name: {weight: 1.0, ...}}")
    parser.add_argument("files", nargs="+", metavar="FILE", help="pictures, videos, .npy arrays, or folders of them")
    parser.add_argument("--prompt", help="the prompt of all files")
    parser.add_argument("--prompts", metavar="FILE", help="prompt file with a row per file, by order or file_name")
    parser.add_argument("--json", action="store_true", help="print one JSON document in place of a table")
    parser.add_argument("--device", help="e.g. cpu or cuda:1; this machine's accelerator without it")


def run(args: Namespace) -> int:
    """Score and print."""
    from verl_digen.tools.score.files import find, prompts_of
    from verl_digen.tools.score.rewards import LocalRewards, as_json, as_table, chosen_device, parse, score_files

    entries = parse(args.reward)
    paths = find(args.files)
    rows = prompts_of(paths, prompt=args.prompt, prompt_file=args.prompts)
    lines = score_files(LocalRewards(entries, chosen_device(args.device)), paths, rows)
    show = as_json if args.json else as_table
    print(show(lines, entries))
    return 1 if any(line.scored.errors for line in lines) else 0
