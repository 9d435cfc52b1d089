//! A bounded series: however long it grows, a fixed number of points spans it.

/// Points kept; beyond that every other one is dropped.
const POINTS: usize = 64;

/// Points of a history, oldest first, evenly thinned.
#[derive(Clone, Debug)]
pub struct Series<T> {
    points: Vec<T>,
    offered: u64,
    every: u64,
}

impl<T> Default for Series<T> {
    fn default() -> Self {
        Self { points: Vec::new(), offered: 0, every: 1 }
    }
}

impl<T: Copy> Series<T> {
    /// Adds a point, or skips it where the series has become coarser.
    pub fn push(&mut self, point: T) {
        self.offered += 1;
        if !(self.offered - 1).is_multiple_of(self.every) {
            return;
        }
        if self.points.len() == POINTS {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
            self.every = self.every.saturating_mul(2);
            if !(self.offered - 1).is_multiple_of(self.every) {
                return;
            }
        }
        self.points.push(point);
    }

    /// The points kept.
    pub fn points(&self) -> &[T] {
        &self.points
    }
}

#[cfg(test)]
mod tests {
    use super::Series;

    #[test]
    fn a_long_history_is_spanned_evenly() {
        let mut series = Series::default();
        for value in 0..10_000_u64 {
            series.push(value);
        }
        let points = series.points();
        assert!(points.len() > 32 && points.len() <= 64);
        assert_eq!(points[0], 0);
        let step = points[1] - points[0];
        assert!(points.windows(2).all(|pair| pair[1] - pair[0] == step));
        assert!(10_000 - points.last().unwrap() <= step);
    }
}
