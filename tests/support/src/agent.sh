# In place of ssh: `FILE [OPTIONS] ADDRESS COMMAND...` runs the command by a shell in the network
# namespace $zero or $one, by the end of the address. A launcher takes nodes of one name for one
# node, so each has a host name of its own.
while case $1 in -[polFi]) shift 2 ;; -*) shift ;; *) false ;; esac; do :; done
case $1 in *.1) node=0 name=$zero ;; *) node=1 name=$one ;; esac; shift
exec ip netns exec $name unshare --uts sh -c "hostname node$node; $*"
