//! Facts about Python objects that outlive calls.

use std::ffi::{CStr, c_int};

use rote_replay::ReplayError;
use rote_replay::frontend::Facts;

use crate::bridge::Bridge;
use crate::fact_kind::FactKind;
use crate::frontend::Aten;
use crate::sys;

/// Reads facts about Python objects that outlive calls.
#[derive(Debug)]
pub struct FactTable {
    table: *mut sys::FactTable,
    seen: Vec<u64>,
    /// Whether `seen` is what the bridge wrote when it last read the table.
    kept: bool,
}

impl FactTable {
    /// An empty table of the session whose calls `call` collects.
    pub(crate) fn new(call: *mut sys::Call) -> Self {
        // SAFETY: makes an object that `drop` frees.
        let table = unsafe { (Bridge::get().functions().table_new)(call) };
        FactTable {
            table,
            seen: Vec::new(),
            kept: false,
        }
    }

    /// Adds a fact of a kind that `abi.h` names; returns its first word and
    /// how many it has.
    ///
    /// # Safety
    /// The objects must be live and of the type that the kind asks for; `key`
    /// may be null.
    pub unsafe fn add(
        &mut self,
        kind: FactKind,
        container: sys::Object,
        key: sys::Object,
    ) -> Result<(usize, usize), ReplayError> {
        let bridge = Bridge::get();
        let mut width = 0;
        // SAFETY: the caller vouches for the objects.
        bridge.check(unsafe {
            (bridge.functions().table_add)(self.table, kind as u32, container, key, &mut width)
        })?;
        let start = self.seen.len();
        self.seen.resize(start + width as usize, 0);
        Ok((start, width as usize))
    }
}

impl Facts<Aten> for FactTable {
    fn read(&mut self, frontend: &Aten) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        let kept = c_int::from(std::mem::replace(&mut self.kept, false));
        // SAFETY: the bridge writes as many words as its facts have.
        bridge.check(unsafe {
            (bridge.functions().table_read)(
                self.table,
                frontend.call(),
                self.seen.as_mut_ptr(),
                kept,
            )
        })?;
        self.kept = true;
        Ok(())
    }

    fn words(&self) -> &[u64] {
        &self.seen
    }

    fn hold(&mut self) -> Result<(), ReplayError> {
        let bridge = Bridge::get();
        // SAFETY: a table of ours.
        bridge.check(unsafe { (bridge.functions().table_hold)(self.table) })
    }

    fn same(&self, word: usize) -> bool {
        let bridge = Bridge::get();
        let mut same = 0;
        // SAFETY: a word of this table.
        let status = unsafe { (bridge.functions().table_same)(self.table, word as u32, &mut same) };
        status == 0 && same != 0
    }

    fn text(&self, word: usize, held: bool) -> String {
        // SAFETY: a word of this table; the text lives until the bridge's next call.
        let text = unsafe {
            CStr::from_ptr((Bridge::get().functions().table_text)(
                self.table,
                word as u32,
                held as c_int,
            ))
        };
        text.to_string_lossy().into_owned()
    }

    fn float(&self, word: usize) -> Result<f64, ReplayError> {
        let bridge = Bridge::get();
        let mut out = 0.0;
        // SAFETY: a word of this table; writes one float.
        let status = unsafe { (bridge.functions().read_float)(self.table, word as u32, &mut out) };
        bridge.check(status)?;
        Ok(out)
    }
}

impl Drop for FactTable {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { (Bridge::get().functions().table_free)(self.table) };
    }
}
