//! Many threads at once.

use crate::rig::Rig;

#[test]
fn eight_threads_end_at_exactly_the_contexts_bytes() {
    let rig = Rig::new(crate::rig::config());
    let mut client = rig.client();
    let context = client.context;
    assert_eq!(client.peer.ask(&format!("storm 8 20000 {context}")), "0");
    assert_eq!(client.billed(), 0);
    assert_eq!(rig.host.view().devices[0].used, crate::rig::CONTEXT);
}
