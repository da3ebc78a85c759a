//! Calendar arithmetic: RFC 3339 for the API, HTTP dates for downloads. Times are UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const NANOS_PER_SECOND: i128 = 1_000_000_000;
const MONTHS: [&str; 12] = [
    "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
];
const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];

/// Now, in whole seconds since 1970.
pub fn unix_seconds() -> i64 {
    (unix_nanos() / NANOS_PER_SECOND) as i64
}

/// Now, in nanoseconds since 1970.
pub fn unix_nanos() -> i128 {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(after) => after.as_nanos() as i128,
        Err(before) => -(before.duration().as_nanos() as i128),
    }
}

/// Days since 1970 of a calendar date (proleptic Gregorian).
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 {
        month_index + 3
    } else {
        month_index - 9
    };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// `2026-01-02T03:04:05.000000006Z`.
pub fn format_rfc3339(seconds: i64, nanos: u32) -> String {
    let (year, month, day) = civil_from_days(seconds.div_euclid(86_400));
    let second = seconds.rem_euclid(86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    if nanos == 0 {
        return format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z");
    }
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanos:09}Z")
}

/// Nanoseconds since 1970 of an RFC 3339 time, or None.
pub fn parse_rfc3339(text: &str) -> Option<i128> {
    let bytes = text.as_bytes();
    let number = |start: usize, end: usize| -> Option<i64> {
        let part = text.get(start..end)?;
        part.bytes()
            .all(|byte| byte.is_ascii_digit())
            .then(|| part.parse().ok())
            .flatten()
    };
    let separators = [(4, b'-'), (7, b'-'), (13, b':'), (16, b':')];
    if bytes.len() < 20
        || separators.iter().any(|(at, byte)| bytes[*at] != *byte)
        || !matches!(bytes[10], b'T' | b't' | b' ')
    {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    if !(1..=12).contains(&month)
        || !(1..=31).contains(&day)
        || hour > 23
        || minute > 59
        || second > 60
    {
        return None;
    }
    let mut at = 19;
    let mut nanos = 0i128;
    if bytes[at] == b'.' {
        let digits = text[at + 1..]
            .bytes()
            .take_while(u8::is_ascii_digit)
            .count();
        if digits == 0 || digits > 18 {
            return None;
        }
        let used = digits.min(9);
        nanos = i128::from(number(at + 1, at + 1 + used)?) * 10i128.pow(9 - used as u32);
        at += 1 + digits;
    }
    let offset_seconds = match text.get(at..)? {
        "Z" | "z" => 0,
        zone if zone.len() == 6 && zone.as_bytes()[3] == b':' => {
            let value = number(at + 1, at + 3)? * 3600 + number(at + 4, at + 6)? * 60;
            match zone.as_bytes()[0] {
                b'+' => value,
                b'-' => -value,
                _ => return None,
            }
        }
        _ => return None,
    };
    let seconds = days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second
        - offset_seconds;
    Some(i128::from(seconds) * NANOS_PER_SECOND + nanos)
}

/// `Thu, 01 Jan 1970 00:00:00 GMT`.
pub fn format_http_date(seconds: i64) -> String {
    let days = seconds.div_euclid(86_400);
    let (year, month, day) = civil_from_days(days);
    let second = seconds.rem_euclid(86_400);
    let weekday = DAYS[days.rem_euclid(7) as usize];
    let month = MONTHS[month as usize - 1];
    format!(
        "{weekday}, {day:02} {month} {year:04} {:02}:{:02}:{:02} GMT",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// Seconds since 1970 of an HTTP date in its preferred form, or None.
pub fn parse_http_date(text: &str) -> Option<i64> {
    let parts: Vec<&str> = text.split_whitespace().collect();
    let [_, day, month, year, time, "GMT"] = parts[..] else {
        return None;
    };
    let month = MONTHS.iter().position(|name| *name == month)? as i64 + 1;
    let mut clock = time.split(':').map(str::parse::<i64>);
    let (hour, minute, second) = (
        clock.next()?.ok()?,
        clock.next()?.ok()?,
        clock.next()?.ok()?,
    );
    Some(
        days_from_civil(year.parse().ok()?, month, day.parse().ok()?) * 86_400
            + hour * 3600
            + minute * 60
            + second,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_instants() {
        assert_eq!(format_rfc3339(0, 0), "1970-01-01T00:00:00Z");
        assert_eq!(
            format_rfc3339(1_700_000_000, 5),
            "2023-11-14T22:13:20.000000005Z"
        );
        assert_eq!(format_rfc3339(951_782_400, 0), "2000-02-29T00:00:00Z");
        assert_eq!(
            format_http_date(784_111_777),
            "Sun, 06 Nov 1994 08:49:37 GMT"
        );
        assert_eq!(
            parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT"),
            Some(784_111_777)
        );
        assert_eq!(
            parse_rfc3339("2023-11-14T22:13:20.5Z"),
            Some(1_700_000_000_500_000_000)
        );
        assert_eq!(
            parse_rfc3339("2023-11-15T00:13:20.000000001+02:00"),
            Some(1_700_000_000_000_000_001)
        );
        for bad in [
            "",
            "2023-11-14",
            "2023-13-14T22:13:20Z",
            "2023-11-14T22:13:20",
            "2023-11-14T22:13:20.Z",
            "x023-11-14T22:13:20Z",
            "2023-11-14T22:13:20+2:00é",
        ] {
            assert_eq!(parse_rfc3339(bad), None, "{bad}");
        }
    }

    #[test]
    fn dates_round_trip_over_centuries() {
        for day in (-100_000i64..200_000).step_by(37) {
            let text = format_rfc3339(day * 86_400 + 3661, 7);
            if text.len() == 30 {
                assert_eq!(
                    parse_rfc3339(&text),
                    Some(i128::from(day * 86_400 + 3661) * NANOS_PER_SECOND + 7),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn noise_is_no_time_or_one_that_prints() {
        let mut noise = crate::fuzz::Noise::new(11);
        let seeds = [
            "Sun, 06 Nov 1994 08:49:37 GMT",
            "2024-02-29T23:59:60.123456789+14:00",
            "9999-12-31T23:59:59Z",
        ];
        for _ in 0..20_000 {
            let text = noise.text(&seeds);
            if let Some(seconds) = parse_http_date(&text) {
                assert!(format_http_date(seconds).ends_with("GMT"));
            }
            let _any = parse_rfc3339(&text);
        }
    }
}
