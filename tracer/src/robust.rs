//! Trends that a few odd points cannot fake: Mann and Kendall's test and Theil and Sen's slope.

/// A line through points, as robust statistics see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Trend {
    /// Median of the slopes between all pairs of points.
    pub(crate) slope: f64,
    /// Lower end of its 95% confidence interval (Sen 1968).
    pub(crate) low: f64,
    /// Upper end.
    pub(crate) high: f64,
    /// Mann and Kendall's statistic in standard deviations: above 2.58, a rise has a chance of less
    /// than 1 in 100 of being none.
    pub(crate) z: f64,
}

impl Trend {
    /// Whether the points rise beyond what chance does.
    pub(crate) fn rises(&self) -> bool {
        self.z > 2.58 && self.low > 0.0
    }
}

/// Judges points (x, y) of which the x never fall. `None` with fewer than six.
///
/// The cost is quadratic: callers keep at most some 64 points, and check what is cheap first.
pub(crate) fn trend(points: &[(u64, u64)]) -> Option<Trend> {
    if points.len() < 6 {
        return None;
    }
    let mut slopes = Vec::with_capacity(points.len() * (points.len() - 1) / 2);
    let mut sign = 0_i64;
    for (index, &(x1, y1)) in points.iter().enumerate() {
        for &(x2, y2) in points.iter().skip(index + 1) {
            sign += i64::from(y2 > y1) - i64::from(y2 < y1);
            if x2 > x1 {
                slopes.push((y2 as f64 - y1 as f64) / (x2 - x1) as f64);
            }
        }
    }
    slopes.sort_unstable_by(f64::total_cmp);
    let count = points.len() as f64;
    let deviation = ((count * (count - 1.0) * (2.0 * count + 5.0) - ties(points)) / 18.0).max(0.0).sqrt();
    let z = if sign == 0 || deviation == 0.0 { 0.0 } else { (sign - sign.signum()) as f64 / deviation };
    let reach = 1.96 * deviation;
    let last = slopes.len().checked_sub(1)?;
    let at = |rank: f64| slopes.get((rank.max(0.0) as usize).min(last)).copied();
    Some(Trend {
        slope: slopes.get(slopes.len() / 2).copied()?,
        low: at(((slopes.len() as f64 - reach) / 2.0).floor())?,
        high: at(f64::midpoint(slopes.len() as f64, reach).ceil())?,
        z,
    })
}

/// What equal values take from the variance.
fn ties(points: &[(u64, u64)]) -> f64 {
    let mut values: Vec<u64> = points.iter().map(|&(_, y)| y).collect();
    values.sort_unstable();
    values
        .chunk_by(|a, b| a == b)
        .map(|group| {
            let size = group.len() as f64;
            size * (size - 1.0) * (2.0 * size + 5.0)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::trend;

    fn of(values: &[u64]) -> super::Trend {
        let points: Vec<(u64, u64)> = values.iter().enumerate().map(|(x, &y)| (x as u64, y)).collect();
        trend(&points).unwrap()
    }

    #[test]
    fn a_line_with_one_odd_point_is_still_a_line() {
        let mut line: Vec<u64> = (0..10).map(|x| 100 + 7 * x).collect();
        line[4] = 1_000_000;
        let trend = of(&line);
        assert!((trend.slope - 7.0).abs() < 1e-9 && trend.rises(), "{trend:?}");
    }

    #[test]
    fn what_goes_up_and_down_or_only_once_does_not_rise() {
        assert!(!of(&[5, 9, 5, 9, 5, 9, 5, 9, 5, 9]).rises());
        assert!(!of(&[5, 5, 5, 5, 5, 5, 5, 5, 5, 50]).rises(), "a step at the end");
        assert!(!of(&[7; 12]).rises());
        let falling: Vec<u64> = (0..10).map(|x| 100 - 7 * x).collect();
        assert!(of(&falling).high < 0.0);
    }

    #[test]
    fn too_few_points_say_nothing() {
        assert_eq!(trend(&[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]), None);
    }
}
