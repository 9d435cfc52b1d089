//! The language of scripts.

use std::time::Duration;

use super::parse::{Step, parse};
use crate::{memory::Family, run::Ownership};

#[test]
fn every_simple_step_is_understood() {
    let text = "init\nctx 0\nctx 1 own\npush 1\npop\nrelease 1\nfree a\nfree-all\nsync\nsleep 50ms\nhold\nready\nprint\n\
                say hello there\nname loader\nwait\nkill-self\nexit 3\n";
    let expected = vec![
        Step::Init,
        Step::Context { ordinal: 0, ownership: None },
        Step::Context { ordinal: 1, ownership: Some(Ownership::Own) },
        Step::Push { ordinal: 1 },
        Step::Pop,
        Step::Release { ordinal: 1 },
        Step::Free { name: "a".to_owned() },
        Step::FreeAll,
        Step::Synchronize,
        Step::Sleep(Duration::from_millis(50)),
        Step::Hold,
        Step::Ready,
        Step::Print,
        Step::Say("hello there".to_owned()),
        Step::Name("loader".to_owned()),
        Step::Wait,
        Step::KillSelf,
        Step::Exit(3),
    ];
    assert_eq!(parse(text), Ok(expected));
}

#[test]
fn allocations_take_a_count_and_an_interval() {
    let step = |family, bytes, count, every| Step::Allocate {
        family,
        name: "w".to_owned(),
        bytes,
        count,
        every: Duration::from_millis(every),
    };
    assert_eq!(parse("alloc w 64MiB"), Ok(vec![step(Family::Device, 64 << 20, 1, 0)]));
    assert_eq!(parse("managed w 4096 x3"), Ok(vec![step(Family::Managed, 4096, 3, 0)]));
    assert_eq!(parse("async-ptsz w 2MiB x3 every 20ms"), Ok(vec![step(Family::AsyncPtsz, 2 << 20, 3, 20)]));
    assert_eq!(parse("vmm w 2MiB every 1s # why"), Ok(vec![step(Family::Vmm, 2 << 20, 1, 1000)]));
    assert_eq!(parse("try host w 1TiB"), Ok(vec![Step::Try(Box::new(step(Family::Host, 1 << 40, 1, 0)))]));
}

#[test]
fn blocks_nest_and_new_processes_get_their_text() {
    let text = "threads 2 {\n  repeat 3 {\n    print\n  }\n}\nfork helper {\n  hold\n}\nspawn w {\n  fork {\n    init\n  }\n}\nexec {\n  init\n}";
    let expected = vec![
        Step::Threads(2, vec![Step::Repeat(3, vec![Step::Print])]),
        Step::Fork { name: Some("helper".to_owned()), steps: vec![Step::Hold] },
        Step::Spawn { name: Some("w".to_owned()), text: "fork {\ninit\n}".to_owned() },
        Step::Exec { name: None, text: "init".to_owned() },
    ];
    assert_eq!(parse(text), Ok(expected));
}

#[test]
fn mistakes_name_their_line() {
    let cases = [
        ("init\nalloc a\n", "line 2", "not a step"),
        ("alloc a many", "line 1", "not a size"),
        ("alloc a 1MiB x", "line 1", "not a number"),
        ("alloc a 1MiB x2 each 3s", "line 1", "every DUR"),
        ("texture a 1MiB", "line 1", "neither a step nor a family"),
        ("\nfork {\ninit\n", "line 2", "not closed"),
        ("init\n}\n", "line 2", "closes no block"),
        ("loop 3 {\n}\n", "line 1", "opens no block"),
        ("spawn {\n  init\n  sleep 5\n}\n", "line 3", "not a duration"),
        ("threads 2 {\nrepeat 2 {\nfork {\n}\n}\n}\n", "line 1", "not possible inside threads"),
        ("exit 256", "line 1", "not a number"),
    ];
    for (text, line, problem) in cases {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.starts_with(line) && error.contains(problem), "{text:?}: {error}");
    }
}

#[test]
fn the_readme_shows_the_language_as_help_does() {
    assert!(include_str!("../../README.md").contains(include_str!("language.txt")));
}
