//! Command lines that need no shell: plain words, quoted or not. For images that have none.

/// What only a shell understands outside of quotes.
const SHELL_CHARACTERS: &str = "|&;<>()$`*?[]{}#~!\n";
/// What it understands within double quotes.
const IN_DOUBLE_QUOTES: &str = "$`";

/// The words of `line`; None when it takes a shell to run it, or there are none.
pub fn plain(line: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut rest = line.trim().chars();
    while let Some(next) = rest.next() {
        match next {
            ' ' | '\t' => words.extend(word.take()),
            '\'' => word
                .get_or_insert_default()
                .push_str(&until(&mut rest, '\'', "")?),
            '"' => word
                .get_or_insert_default()
                .push_str(&until(&mut rest, '"', IN_DOUBLE_QUOTES)?),
            '\\' => word.get_or_insert_default().push(rest.next()?),
            other if SHELL_CHARACTERS.contains(other) => return None,
            other => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    // `NAME=value program` sets a variable.
    words
        .first()
        .is_some_and(|first| !first.contains('='))
        .then_some(words)
}

/// The quoted text up to `end`; None when it does not end, or holds one of `refused`.
fn until(rest: &mut std::str::Chars<'_>, end: char, refused: &str) -> Option<String> {
    let mut text = String::new();
    loop {
        match rest.next()? {
            next if next == end => return Some(text),
            next if refused.contains(next) => return None,
            '\\' if end == '"' => match rest.next()? {
                escaped @ ('"' | '\\' | '$' | '`') => text.push(escaped),
                other => text.extend(['\\', other]),
            },
            next => text.push(next),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_a_shell_would_make() {
        for (line, words) in [
            ("/app/tool", vec!["/app/tool"]),
            ("  tool  -a\t--b=c ", vec!["tool", "-a", "--b=c"]),
            (
                "tool 'a b' \"c d\" e\\ f",
                vec!["tool", "a b", "c d", "e f"],
            ),
            ("tool '' \"\"", vec!["tool", "", ""]),
            ("tool 'it'\"'\"'s'", vec!["tool", "it's"]),
            (
                r#"tool "a\"b\\c\d" '$x*'"#,
                vec!["tool", r#"a"b\c\d"#, "$x*"],
            ),
            ("tool a'b'\"c\"", vec!["tool", "abc"]),
            ("tool 'two\nlines'", vec!["tool", "two\nlines"]),
        ] {
            assert_eq!(plain(line).unwrap(), words, "{line}");
        }
    }

    #[test]
    fn what_takes_a_shell_is_no_list_of_words() {
        for line in [
            "",
            "  ",
            "a | b",
            "a && b",
            "a; b",
            "a\nb",
            "echo $A",
            "echo \"$A\"",
            "echo `b`",
            "ls *.c",
            "cd ~",
            "A=1 b",
            "a > f",
            "(a)",
            "a 'open",
            "a \"open",
            "a \\",
            "! a",
            "# a",
            "a {b,c}",
        ] {
            assert_eq!(plain(line), None, "{line}");
        }
        let mut noise = crate::fuzz::Noise::new(21);
        for _ in 0..20_000 {
            if let Some(words) = plain(&noise.text(&["tool 'a b' \"c\" \\d"])) {
                assert!(!words.is_empty());
            }
        }
    }
}
