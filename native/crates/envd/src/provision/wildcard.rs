//! Names and patterns of Go's `filepath.Match`, which BuildKit takes sources by.

/// Whether a name fits a pattern, as Go's `filepath.Match` says. The host has checked that it is one.
pub fn fits(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    fits_rest(&pattern, &name)
}

fn fits_rest(pattern: &[char], name: &[char]) -> bool {
    // The last `*`, and how much of the name it has taken: a later one makes an earlier one's choice final.
    let (mut at, mut of) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while of < name.len() {
        if pattern.get(at) == Some(&'*') {
            star = Some((at + 1, of));
            at += 1;
        } else if let Some(length) = one(&pattern[at.min(pattern.len())..], name[of]) {
            at += length;
            of += 1;
        } else if let Some((after, taken)) = star {
            star = Some((after, taken + 1));
            (at, of) = (after, taken + 1);
        } else {
            return false;
        }
    }
    pattern[at.min(pattern.len())..]
        .iter()
        .all(|left| *left == '*')
}

/// How much of the pattern stands for the character, None when it does not fit.
fn one(pattern: &[char], character: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == character).then_some(2),
        ['[', rest @ ..] => group(rest, character).map(|length| length + 1),
        [literal, ..] => (*literal == character).then_some(1),
        [] => None,
    }
}

fn group(rest: &[char], character: char) -> Option<usize> {
    let is_negated = rest.first() == Some(&'^');
    let mut at = usize::from(is_negated);
    let (first, mut has_it) = (at, false);
    let letter = |at: &mut usize| -> Option<char> {
        if rest.get(*at) == Some(&'\\') {
            *at += 1;
        }
        *at += 1;
        rest.get(*at - 1).copied()
    };
    while rest.get(at) != Some(&']') || at == first {
        let low = letter(&mut at)?;
        let mut high = low;
        if rest.get(at) == Some(&'-') {
            at += 1;
            high = letter(&mut at)?;
        }
        has_it |= (low..=high).contains(&character);
    }
    (has_it != is_negated).then_some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_in_go() {
        let yes = [
            ("*", ".hidden"),
            ("*.txt", "a.txt"),
            ("a*b*c", "aXbYbc"),
            ("?", "é"),
            ("[a-c]x", "bx"),
            ("[^a-c]x", "dx"),
            ("\\*", "*"),
            ("[\\]]", "]"),
            ("a**", "a"),
        ];
        let no = [
            ("*.txt", "a.txt2"),
            ("?", ""),
            ("?", "ab"),
            ("[a-c]x", "dx"),
            ("[^a-c]x", "ax"),
            ("\\*", "a"),
            ("a*b", "a"),
            ("", "a"),
            ("[a", "a"),
        ];
        assert!(
            yes.iter().all(|(pattern, name)| fits(pattern, name)),
            "{yes:?}"
        );
        assert!(
            !no.iter().any(|(pattern, name)| fits(pattern, name)),
            "{no:?}"
        );
        let mut noise = crate::fuzz::Noise::new(5);
        for _ in 0..5_000 {
            let _any = fits(&noise.text(&["[a-c]*?\\x[^"]), &noise.text(&["abc-]["]));
        }
    }
}
