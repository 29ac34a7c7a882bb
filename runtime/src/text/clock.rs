//! The date for `strftime_now` in chat templates, in UTC.
//!
//! Invariant: no locale and no time zone is read. Days become dates by Hinnant's `civil_from_days` (chrono-Compatible
//! Low-Level Date Algorithms). `template` is the only caller.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Seconds since 1970.
pub(super) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Formats a time as C's `strftime` does; letters that are not known stay as they are.
pub(super) fn strftime(format: &str, time_s: u64) -> String {
    let time = Time::new(time_s);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let (plain, letter) = match chars.next() {
            Some('-') => (true, chars.next()),
            letter => (false, letter),
        };
        time.field(letter, plain, &mut out);
    }
    out
}

struct Time {
    year: u64,
    month: u64,
    day: u64,
    day_of_year: u64,
    weekday: u64,
    second_of_day: u64,
}

impl Time {
    fn new(time_s: u64) -> Self {
        let days = time_s / 86_400;
        // Days since 0000-03-01, in eras of 400 years; years here start in March, so that a leap day ends one.
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * from_march + 2) / 153;
        let day = from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let day_of_year = if month > 2 { from_march + 60 + u64::from(leap) } else { from_march - 305 };
        Self { year, month, day, day_of_year, weekday: (days + 4) % 7, second_of_day: time_s % 86_400 }
    }

    /// Writes one field; `plain`: without leading zeros.
    fn field(&self, letter: Option<char>, plain: bool, out: &mut String) {
        let hour = self.second_of_day / 3_600;
        let (width, number) = match letter {
            Some('d') => (2, self.day),
            Some('m') => (2, self.month),
            Some('y') => (2, self.year % 100),
            Some('Y') => (4, self.year),
            Some('j') => (3, self.day_of_year),
            Some('H') => (2, hour),
            Some('I') => (2, (hour + 11) % 12 + 1),
            Some('M') => (2, self.second_of_day / 60 % 60),
            Some('S') => (2, self.second_of_day % 60),
            _ => return out.push_str(&self.word(letter, plain)),
        };
        let width = if plain { 0 } else { width };
        write!(out, "{number:0width$}").expect("a string takes all");
    }

    fn word(&self, letter: Option<char>, plain: bool) -> String {
        let month = MONTHS[self.month as usize - 1];
        let weekday = WEEKDAYS[self.weekday as usize];
        match letter {
            Some('B') => month.into(),
            Some('b' | 'h') => month[..3].into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('p') => if self.second_of_day < 43_200 { "AM" } else { "PM" }.into(),
            Some('F') => strftime_parts(self, "Y-m-d"),
            Some('T') => strftime_parts(self, "H:M:S"),
            Some('%') => "%".into(),
            Some('Z') => "UTC".into(),
            Some(other) => format!("%{}{other}", if plain { "-" } else { "" }),
            None => "%".into(),
        }
    }
}

/// Several fields with single characters between them.
fn strftime_parts(time: &Time, letters: &str) -> String {
    let mut out = String::new();
    for letter in letters.chars() {
        if letter.is_ascii_alphabetic() {
            time.field(Some(letter), false, &mut out);
        } else {
            out.push(letter);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_match_the_c_library() {
        // `date -u -d @N +FORMAT` says the same.
        for (time_s, expected) in [
            (0, "01 Jan 1970 Thursday 001 00:00:00"),
            (951_782_400, "29 Feb 2000 Tuesday 060 00:00:00"),
            (951_868_800, "01 Mar 2000 Wednesday 061 00:00:00"),
            (1_735_689_599, "31 Dec 2024 Tuesday 366 23:59:59"),
            (1_767_225_599, "31 Dec 2025 Wednesday 365 23:59:59"),
            (4_107_542_400, "01 Mar 2100 Monday 060 00:00:00"),
        ] {
            assert_eq!(strftime("%d %b %Y %A %j %H:%M:%S", time_s), expected, "{time_s}");
        }
    }

    #[test]
    fn other_letters() {
        let time_s = 1_735_747_505; // 2025-01-01 16:05:05
        assert_eq!(
            strftime("%F %T %-d %-m %I%p %B %a %y %Z 100%%", time_s),
            "2025-01-01 16:05:05 1 1 04PM January Wed 25 UTC 100%"
        );
        assert_eq!(strftime("%Q %", time_s), "%Q %");
    }
}
